"""Which packed weights in the user's cache folder are of which model, so that those of a file that has been
replaced do not stay there for ever.

For each path that a model was opened at lies a note, `source-HASH.json`, with the path and the digest that
the model had; packed weights are named by the digest. Models at several paths may share them.
"""

import hashlib
import json
import logging
from contextlib import suppress
from pathlib import Path

from ..devices.user_files import read_small, replace_text

log = logging.getLogger("nybble")


def remember(model: Path, digest: str, packed: Path) -> None:
    """Notes that `packed`, in the user's cache folder, is what a model at this path is packed into. Removes
    what it was packed into before, unless a model at another path is that; who has it mapped keeps it.
    Whatever cannot be written or read is left alone."""
    folder, path = packed.parent, str(model.resolve())
    note = folder / f"source-{hashlib.sha256(path.encode(errors='surrogateescape')).hexdigest()[:32]}.json"
    before = _digest(note)
    if before == digest:
        return
    try:
        replace_text(note, json.dumps({"path": path, "digest": digest}))
    except OSError as error:
        log.info("%s: cannot be written: %s", note, error.strerror)
        return
    if before is None or any(_digest(other) == before for other in folder.glob("source-*.json")):
        return
    stale = packed.with_name(packed.name.replace(digest, str(before)))
    with suppress(OSError):
        stale.unlink()
        log.info("%s: removed, for %s has changed", stale, path)


def _digest(note: Path) -> str | None:
    """The digest in a note; None where there is none that is sound."""
    with suppress(OSError, ValueError):
        found = json.loads(read_small(note))
        digest = found.get("digest") if isinstance(found, dict) else None
        if isinstance(digest, str) and len(digest) == 64 and set(digest) <= set("0123456789abcdef"):
            return digest
    return None
