// What attention of prompts and of generated tokens share.
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
    uint window;
    uint n_pages;
    uint n_splits;
    uint n_tiles;
    float scale;
    float softcap;
};

// Positions that a split of keys has. Splits begin at multiples, wherever a sequence ends.
constant constexpr uint SPLIT = 8 * PAGE_POSITIONS;

// First position that a row at `pos` sees: all, or the last `window` if that is not 0.
inline uint first_seen(uint pos, uint window) { return window != 0 && pos + 1 > window ? pos + 1 - window : 0; }
