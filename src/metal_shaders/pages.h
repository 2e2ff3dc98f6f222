// Keys and values of sequences. A page has 64 positions of a group of layers; in it a layer has keys
// `(n_head_kv, 64, head_dim)`, then values `(n_head_kv, 64, head_dim_v)`, in f16.
#pragma once
#include "common.h"

constant constexpr uint PAGE_POSITIONS = 64;

// A page by its address on the GPU.
struct Page {
    device half* data;
};

// What a row of a batch is: its position, and where the page table of its sequence begins in the tables.
struct Row {
    uint pos;
    uint table;
};
