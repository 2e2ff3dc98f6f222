// Shared by the attention of prompts and of generated tokens.
#pragma once
#include "pages.h"

struct AttentionArgs {
    uint n_rows;
    uint n_head;
    uint n_head_kv;
    uint head_dim;
    uint head_dim_v;
    uint key_offset;
    uint value_offset;
    uint key_bits;
    uint value_bits;
    uint window;
    uint chunked;
    uint n_pages;
    uint n_splits;
    uint n_tiles;
    float scale;
    float softcap;
    float alibi;
};

// Positions per split of the keys. Splits begin at multiples of this, wherever a sequence ends.
constant constexpr uint SPLIT = 2 * PAGE_POSITIONS;

// First position that a row at `pos` sees: 0 or, if `window` is not 0, that of the last `window` positions, or of its chunk of
// so many positions.
inline uint first_seen(uint pos, uint window, uint chunked) {
    if (chunked != 0) return pos - pos % window;
    return window != 0 && pos + 1 > window ? pos + 1 - window : 0;
}

// ALiBi's slope of a head, 0 if `alibi` is: the last head's is `2^-alibi`. If the number of heads is no power of two, those
// beyond the largest power take every other slope of a model with twice as many.
inline float slope_of(uint head, uint n_head, float alibi) {
    const uint n = 1u << (31 - clz(n_head));
    const float exponent = head < n ? float(head + 1) : float(2 * (head - n) + 1) / 2.0f;
    return alibi == 0.0f ? 0.0f : exp2(-alibi * exponent / float(n));
}
