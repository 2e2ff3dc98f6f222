// Weight formats, laid out as in the GGUF file; src/quant describes their bytes. A part is 16 consecutive weights of a
// row. Each format is a type with one function, `part`, which reads a part as 4 x 4 floats in order.
#pragma once
#include "common.h"

// Calls X(format) for every format.
#define FOR_FORMATS(X) X(f32) X(f16) X(bf16) X(q8_0) X(q4_0) X(q5_0) X(q4_k) X(q5_k) X(q6_k) X(iq4_xs) X(iq4_nl) X(mxfp4) X(q1_0) X(q2_0)

struct bfloat_bits { ushort bits; };

inline float widen(device const float* x) { return *x; }
inline float widen(device const half* x) { return float(*x); }
inline float widen(device const bfloat_bits* x) { return as_type<float>(uint(x->bits) << 16); }
inline float4 widen4(device const float* x) { return *(device const packed_float4*)x; }
inline float4 widen4(device const half* x) { return float4(half4(*(device const packed_half4*)x)); }
inline float4 widen4(device const bfloat_bits* x) {
    return as_type<float4>(uint4(ushort4(*(device const packed_ushort4*)x)) << 16);
}

// Values 16 * part .. + 16 of a row of n values; zeros after its end.
template <typename T>
inline float4x4 values(device const T* row, uint part, uint n) {
    device const T* x = row + 16 * part;
    if (16 * part + 16 <= n) return float4x4(widen4(x), widen4(x + 4), widen4(x + 8), widen4(x + 12));
    float4x4 result = float4x4(0.0f);
    for (uint i = 0; i < 16; i++) {
        if (16 * part + i < n) result[i / 4][i % 4] = widen(x + i);
    }
    return result;
}

// Sum of 16 products, in this order.
inline float dot16(float4x4 a, float4x4 b) {
    return dot(a[0], b[0]) + dot(a[1], b[1]) + dot(a[2], b[2]) + dot(a[3], b[3]);
}

// Loads 16 bytes from an address that is a multiple of 1, 2 or 4.
inline uint4 load_1(device const uchar* p) {
    device const packed_uchar4* b = (device const packed_uchar4*)p;
    return uint4(as_type<uint>(uchar4(b[0])), as_type<uint>(uchar4(b[1])), as_type<uint>(uchar4(b[2])),
                 as_type<uint>(uchar4(b[3])));
}
inline uint4 load_2(device const uchar* p) {
    device const packed_ushort4* b = (device const packed_ushort4*)p;
    return uint4(as_type<uint2>(ushort4(b[0])), as_type<uint2>(ushort4(b[1])));
}
inline uint4 load_4(device const uchar* p) { return *(device const packed_uint4*)p; }

// The low (0) or high (1) nibbles of 16 bytes.
inline uint4 nibbles(uint4 bytes, uint high) { return (bytes >> (4 * high)) & 0x0F0F0F0Fu; }

// The f16 at an even address.
inline float scale(device const uchar* p) { return float(*(device const half*)p); }

// `scale * q + offset` of 16 unsigned bytes.
inline float4x4 affine(uint4 q, float scale, float offset) {
    return float4x4(float4(as_type<uchar4>(q.x)) * scale + offset, float4(as_type<uchar4>(q.y)) * scale + offset,
                    float4(as_type<uchar4>(q.z)) * scale + offset, float4(as_type<uchar4>(q.w)) * scale + offset);
}

// Scale and minimum of sub-block s in Q4_K and Q5_K, from eight six-bit pairs in 12 bytes.
inline float2 scale_min(device const uchar* b, uint s) {
    if (s < 4) return float2(b[s] & 63, b[s + 4] & 63);
    return float2((b[s + 4] & 15) | (b[s - 4] >> 6 << 4), (b[s + 4] >> 4) | (b[s] >> 6 << 4));
}

// `scale * table[q]` for 4 or 16 bytes, all below 16.
inline float4 looked_up(constant float* table, uint bytes, float scale) {
    const uchar4 q = as_type<uchar4>(bytes);
    return scale * float4(table[q.x], table[q.y], table[q.z], table[q.w]);
}
inline float4x4 looked_up(constant float* table, uint4 q, float scale) {
    return float4x4(looked_up(table, q.x, scale), looked_up(table, q.y, scale), looked_up(table, q.z, scale),
                    looked_up(table, q.w, scale));
}

// Values of the codes of IQ4_NL and IQ4_XS.
constant float iq4_values[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                                 1.0f,    13.0f,   25.0f,  38.0f,  53.0f,  69.0f,  89.0f,  113.0f};
// Twice the values of the codes of MXFP4.
constant float mxfp4_values[16] = {0.0f, 1.0f,  2.0f,  3.0f,  4.0f,  6.0f,  8.0f,  12.0f,
                                   0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f};

struct f32 {
    static float4x4 part(device const uchar* row, uint part, uint n) {
        return values((device const float*)row, part, n);
    }
};

struct f16 {
    static float4x4 part(device const uchar* row, uint part, uint n) {
        return values((device const half*)row, part, n);
    }
};

struct bf16 {
    static float4x4 part(device const uchar* row, uint part, uint n) {
        return values((device const bfloat_bits*)row, part, n);
    }
};

// Blocks of 32 weights, 34 bytes: f16 d, 32 signed bytes.
struct q8_0 {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 2 * 34;
        const uint4 q = load_2(block + 2 + part % 2 * 16);
        const float d = scale(block);
        return float4x4(float4(as_type<char4>(q.x)) * d, float4(as_type<char4>(q.y)) * d,
                        float4(as_type<char4>(q.z)) * d, float4(as_type<char4>(q.w)) * d);
    }
};

// Blocks of 32, 18 bytes: f16 d, 16 bytes of nibbles; low ones are weights 0 to 15.
struct q4_0 {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 2 * 18;
        const float d = scale(block);
        return affine(nibbles(load_2(block + 2), part % 2), d, -8.0f * d);
    }
};

// Blocks of 32, 22 bytes: f16 d, 32 high bits, nibbles as above.
struct q5_0 {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 2 * 22;
        const float d = scale(block);
        const uint high = ((device const ushort*)(block + 2))[part % 2];
        // The multiplication moves bit k of a nibble to byte k.
        const uint4 four = (uint4(high, high >> 4, high >> 8, high >> 12) & 15u) * 0x00204081u & 0x01010101u;
        return affine(nibbles(load_2(block + 6), part % 2) | (four << 4), d, -16.0f * d);
    }
};

// Blocks of 256, 144 bytes: f16 d, f16 dmin, 12 bytes of scales, 128 of nibbles, 64 weights in 32 of them.
struct q4_k {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 16 * 144;
        const uint i = part % 16, s = i / 2;
        const float2 sm = scale_min(block + 4, s);
        const uint4 q = nibbles(load_4(block + 16 + s / 2 * 32 + i % 2 * 16), s % 2);
        return affine(q, scale(block) * sm.x, -scale(block + 2) * sm.y);
    }
};

// Blocks of 256, 176 bytes: as Q4_K with 32 bytes of high bits before the nibbles, bit s of sub-block s.
struct q5_k {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 16 * 176;
        const uint i = part % 16, s = i / 2;
        const float2 sm = scale_min(block + 4, s);
        const uint4 high = (load_4(block + 16 + i % 2 * 16) >> s & 0x01010101u) << 4;
        const uint4 q = nibbles(load_4(block + 48 + s / 2 * 32 + i % 2 * 16), s % 2) | high;
        return affine(q, scale(block) * sm.x, -scale(block + 2) * sm.y);
    }
};

// Blocks of 256, 210 bytes: 128 of low nibbles, 64 of high bit pairs, 16 signed scales, f16 d.
struct q6_k {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 16 * 210;
        const uint i = part % 16, h = i / 8, j = i % 8 / 2, at = i % 2 * 16;
        const uint4 low = nibbles(load_2(block + 64 * h + 32 * (j % 2) + at), j / 2);
        const uint4 high = load_2(block + 128 + 32 * h + at) >> (2 * j) & 0x03030303u;
        const float d = scale(block + 208) * float(as_type<char>(block[192 + i]));
        return affine(low | (high << 4), d, -32.0f * d);
    }
};

// Blocks of 256, 136 bytes: f16 d, 8 times 2 high bits and 4 low bits of scales, 128 bytes of nibbles, 32 weights in
// 16 of them.
struct iq4_xs {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 16 * 136;
        const uint s = part % 16 / 2;
        const uint low = block[4 + s / 2] >> (4 * (s % 2)) & 15;
        const uint high = ((device const ushort*)(block + 2))[0] >> (2 * s) & 3;
        const float d = scale(block) * (float(low | (high << 4)) - 32.0f);
        return looked_up(iq4_values, nibbles(load_4(block + 8 + 16 * s), part % 2), d);
    }
};

// Blocks of 32, 18 bytes: f16 d, nibbles as in Q4_0.
struct iq4_nl {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 2 * 18;
        return looked_up(iq4_values, nibbles(load_2(block + 2), part % 2), scale(block));
    }
};

// Blocks of 32, 17 bytes: exponent of the scale, nibbles as in Q4_0.
struct mxfp4 {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 2 * 17;
        const uint e = block[0];
        // 2^(e - 128); for the two smallest exponents it is denormal.
        const float d = as_type<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        return looked_up(mxfp4_values, nibbles(load_1(block + 1), part % 2), d);
    }
};

// Blocks of 128, 18 bytes: f16 d, a bit per weight, set where it is positive.
struct q1_0 {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 8 * 18;
        const float d = scale(block);
        const uint positive = ((device const ushort*)(block + 2))[part % 8];
        // The multiplication moves bit k of a nibble to byte k.
        const uint4 four = (uint4(positive, positive >> 4, positive >> 8, positive >> 12) & 15u) * 0x00204081u;
        return affine(four & 0x01010101u, 2.0f * d, -d);
    }
};

// Blocks of 64, 18 bytes: f16 d, four weights in each byte, the first in its lowest bits.
struct q2_0 {
    static float4x4 part(device const uchar* row, uint part, uint) {
        device const uchar* block = row + part / 4 * 18;
        const float d = scale(block);
        device const ushort* pairs = (device const ushort*)(block + 2) + part % 4 * 2;
        const uint4 four = uint4(pairs[0], pairs[0] >> 8, pairs[1], pairs[1] >> 8) & 255u;
        return affine((four | (four << 6) | (four << 12) | (four << 18)) & 0x03030303u, d, -d);
    }
};
