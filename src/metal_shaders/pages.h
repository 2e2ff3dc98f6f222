// Keys and values of sequences. A page has 64 positions of a group of layers. Each layer has the keys of its heads, then
// their values; a head's 64 rows are a block, laid out as src/arch/kv.rs describes.
#pragma once
#include "common.h"

constant constexpr uint PAGE_POSITIONS = 64;
// Bits per value in f16, which has no scales; all others, 8, 6, 5 and 4, have one per GROUP values.
constant constexpr uint F16_BITS = 16;
constant constexpr uint GROUP = 32;

// A page, given by its address on the GPU.
struct Page {
    device uchar* data;
};

// A row of a batch: its position, and the index at which its sequence's page table begins.
struct Row {
    uint pos;
    uint table;
};

// Bytes of a block with rows of `dim` values.
inline uint block_bytes(uint bits, uint dim) {
    if (bits == F16_BITS) return PAGE_POSITIONS * dim * 2;
    return PAGE_POSITIONS * ((dim + GROUP - 1) / GROUP) * (4 * bits + 2);
}

// The planes of a quantised block: the four upper bits of all values, their lower bits, a bf16 scale per group.
struct Planes {
    device uchar* upper;
    device uchar* lower;
    device ushort* scales;
};

inline Planes planes(device uchar* block, uint bits, uint dim) {
    const uint groups = PAGE_POSITIONS * ((dim + GROUP - 1) / GROUP);
    device uchar* lower = block + 16 * groups;
    return Planes{block, lower, (device ushort*)(lower + 4 * (bits - 4) * groups)};
}

// Bits of four values that are next to each other, one per byte: value j of a group has `width` (1, 2 or 4) bits in byte
// `j % (4 * width)`, from bit `width * (j / (4 * width))` on. `j` is a multiple of 4.
inline uint unpacked(device const uchar* group, uint width, uint j) {
    const uint four = *(device const uint*)(group + (j & (4 * width - 1)));
    return four >> (width * (j / 4 >> width / 2)) & ((1u << width) - 1) * 0x01010101u;
}

// Values c .. c + 4 of a row of a block; `c` is a multiple of 4.
inline float4 load4(device uchar* block, uint bits, uint dim, uint row, uint c) {
    if (bits == F16_BITS) return float4(half4(*(device const packed_half4*)((device const half*)block + row * dim + c)));
    const Planes from = planes(block, bits, dim);
    const uint group = row * ((dim + GROUP - 1) / GROUP) + c / GROUP, j = c % GROUP, width = bits - 4;
    uint codes = unpacked(from.upper + 16 * group, 4, j);
    if (width != 0) codes = codes << width | unpacked(from.lower + 4 * width * group, width, j);
    // A code stands for the middle of its interval.
    const float scale = as_type<float>(uint(from.scales[group]) << 16) * float(1u << (8 - bits));
    return (float4(as_type<uchar4>(codes)) - 0.5f * float((1u << bits) - 1)) * scale;
}
