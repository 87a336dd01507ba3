// What the parts of a stream (ranges, rows, experts) have in common: each says which reads of it may begin,
// and takes note of those that have ended. One queue has the reads of all of them, named by tags.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "aligned_buffer.h"
#include "read_queue.h"

namespace nybble {

// Of one read: enough to keep a disk busy, and no more pages than it takes at once where none are huge.
constexpr size_t kPieceBytes = 512 << 10;

// Why a stream does not go on.
struct StreamTrouble {
    std::string file;
    bool failed = false;  // no range is read any more
    std::string problem;  // of the step, which fails by it

    void note(const std::string& what, const std::string& reason) { note(problem, what, reason); }
    // Into a part's own problem, which is the step's once it comes to what could not be read.
    void note(std::string& into, const std::string& what, const std::string& reason) {
        failed = true;
        into = file + ": reading " + what + ": " + reason;
    }
    void clear() {
        failed = false;
        problem.clear();
    }
};

class ReadPart {
  public:
    // Whether a read of it may begin now.
    virtual bool may_read() = 0;
    // The next read, which has this tag until it has ended.
    virtual ReadRequest take(uint32_t tag) = 0;
    // It has, well where there is no `reason`. Of a read from before the stream began anew (not `current`)
    // only what it was read into is of interest.
    virtual void finish(uint32_t tag, bool current, const std::string& reason) = 0;

  protected:
    ~ReadPart() = default;
};

// Memory for reads, which stays where it is.
class ReadMemory {
  public:
    // Aligned, and from one huge page on filled up to whole ones, so that they may back all of it: a disk
    // takes a read into hundreds of scattered pages as several. A forked child gets none of it: were a page
    // shared with a child while the disk writes into it, the child could end up with the page, and this
    // process with a copy from before.
    void allocate(size_t bytes);
    uint8_t* data() const { return data_; }

  private:
    AlignedBuffer buffer_;
    uint8_t* data_ = nullptr;
};

}  // namespace nybble
