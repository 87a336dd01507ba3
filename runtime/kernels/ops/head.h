// Finding the highest logit with the upper halves of most weights alone, for head_search.cpp. Included inside
// the namespace of an instruction set.

// Adds to a token's y, which is what the upper halves give, how much more it can be; `bounds` is [groups].
// Where what a logit is at least is more than the floor, it becomes that.
void bound_logits(const PackedLinear& w, const float* bounds, float* y, int tile_begin, int tile_end,
                  HeadFloor* floor) {
    const TilePlaces places(w);
    const int groups = w.groups();
    const size_t group_bytes = w.group_bytes();
    for (int tile = tile_begin; tile < tile_end; ++tile) {
        const uint8_t* header = places.body(tile);
        F32 bound = zero();
        for (int g = 0; g < groups; ++g, header += group_bytes) {
            const F32 scale = abs(load_f16(reinterpret_cast<const uint16_t*>(header)));
            bound = fma(set1(bounds[g]), scale, bound);
        }
        float* logits = y + tile * kTileRows;
        const F32 middle = load(logits);
        store(logits, add(middle, bound));
        if ((tile + 1) * kTileRows > w.rows) continue;  // what pads the last tile is no token
        const float least = reduce_max(sub(middle, bound));
        if (least > floor->value) *floor = {least, tile};
    }
}

// Which of up to 64 tiles have a row whose logit may come to `least`, a bit each: of those that may by their
// bounds, `upper` [vocab], these are brought nearer with the lower halves of the slices in turn, until all of
// a tile's are under it. Counts the slices that were read.
uint64_t reaching_tiles(const PackedLinear& w, Activations x, const HeadSlice* slices, int count,
                        int tile_begin, int tile_end, const float* upper, float least, int64_t* read) {
    const TilePlaces places(w);
    const size_t slice_bytes = w.slice_bytes(), group_bytes = w.group_bytes();
    const int per_group = w.slices_per_group;
    const auto header_at = [&](const uint8_t* body, int slice) {
        return body + slice / per_group * group_bytes;
    };
    const auto ask_for = [&](const uint8_t* body, const uint8_t* lower, int slice) {
        prefetch(header_at(body, slice));
        for (size_t line = 0; line < slice_bytes; line += 64) prefetch(lower + slice * slice_bytes + line);
    };
    uint64_t reaching = 0;
    for (int tile = tile_begin; tile < tile_end; ++tile) {
        if (!any_not_less(load(upper + tile * kTileRows), least)) continue;
        reaching |= uint64_t{1} << (tile - tile_begin);
        ask_for(places.body(tile), places.lower(tile), slices[0].slice);
    }
    for (int tile = tile_begin; tile < tile_end; ++tile) {
        const uint64_t bit = uint64_t{1} << (tile - tile_begin);
        if ((reaching & bit) == 0) continue;
        const uint8_t *body = places.body(tile), *lower = places.lower(tile);
        F32 bound = load(upper + tile * kTileRows);
        for (int i = 0; i < count; ++i) {
            const HeadSlice& s = slices[i];
            if (i + 1 < count) ask_for(body, lower, slices[i + 1].slice);
            const TokenSlice input{x.data + static_cast<size_t>(s.slice) * kActivationBytes, 0};
            const int8_t* q = input.codes();
            I32 even = set1(s.start), odd = set1(0);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const Bytes packed = load_bytes(lower + s.slice * slice_bytes + j * 64);
                even = dot4<false>(even, low_nibbles(packed), broadcast4(q + j * 8));
                odd = dot4<false>(odd, high_nibbles(packed), broadcast4(q + j * 8 + 4));
            }
            const F32 scale = load_f16(reinterpret_cast<const uint16_t*>(header_at(body, s.slice)));
            bound = fma(mul(to_float(add(even, odd)), set1(s.scale)), scale, bound);
            bound = fma(set1(-s.bound), abs(scale), bound);
            ++*read;
            if (any_not_less(bound, least)) continue;
            reaching &= ~bit;
            break;
        }
    }
    return reaching;
}
