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
    uint n_pages;
    uint n_splits;
    uint n_tiles;
    float scale;
    float softcap;
};

// Positions per split of the keys. Splits begin at multiples of this, wherever a sequence ends.
constant constexpr uint SPLIT = 2 * PAGE_POSITIONS;

// First position that a row at `pos` sees: 0, or that of the last `window` positions if `window` is not 0.
inline uint first_seen(uint pos, uint window) { return window != 0 && pos + 1 > window ? pos + 1 - window : 0; }
