// Keys and values of sequences. A page has 64 positions of a group of layers; each layer has its keys
// `(n_head_kv, 64, head_dim)`, then its values `(n_head_kv, 64, head_dim_v)`, in f16.
#pragma once
#include "common.h"

constant constexpr uint PAGE_POSITIONS = 64;

// A page, given by its address on the GPU.
struct Page {
    device half* data;
};

// A row of a batch: its position, and the index at which its sequence's page table begins.
struct Row {
    uint pos;
    uint table;
};
