// Weight formats, laid out as in the GGUF file; src/quant describes their bytes. A part is 16 consecutive weights of a
// row. Each format has a function `part(base, i, n)`, which reads part `i` of the row of `n` values at byte `base` of `w`
// as 4 x 4 floats in order. With `WIDE`, rows begin at multiples of 16 bytes, whole parts only, and `x` has vectors.

// Sum of `sum` and 16 products, in this order.
fn dot16(a: mat4x4<f32>, b: mat4x4<f32>, start: f32) -> f32 {
    var sum = start;
//! for v < 4
    sum = fma(a[$v].x, b[$v].x, sum);
    sum = fma(a[$v].y, b[$v].y, sum);
    sum = fma(a[$v].z, b[$v].z, sum);
    sum = fma(a[$v].w, b[$v].w, sum);
//! end
    return sum;
}

// The four bytes of a word as numbers: bits of an f16 from 1024 on, as GPUs convert integers slower than they do f16.
fn bytes(q: u32) -> vec4<f32> {
    let even = unpack2x16float((q & 0x00FF00FFu) | 0x64006400u);
    let odd = unpack2x16float(((q >> 8u) & 0x00FF00FFu) | 0x64006400u);
    return vec4<f32>(even.x, odd.x, even.y, odd.y) - vec4<f32>(1024.0);
}

// `scale * q + offset` of 16 unsigned bytes.
fn affine(q: vec4<u32>, scale: f32, offset: f32) -> mat4x4<f32> {
    let s = vec4<f32>(scale);
    let o = vec4<f32>(offset);
    return mat4x4<f32>(fma(bytes(q.x), s, o), fma(bytes(q.y), s, o), fma(bytes(q.z), s, o), fma(bytes(q.w), s, o));
}

// The low (0) or high (1) nibbles of 16 bytes.
fn nibbles(q: vec4<u32>, high: u32) -> vec4<u32> {
    return (q >> vec4<u32>(4u * high)) & vec4<u32>(0x0F0F0F0Fu);
}

// 16 bits as 16 bytes of 0 or 1. The multiplication moves bit k of a nibble to byte k.
fn spread(bits: u32) -> vec4<u32> {
    let four = vec4<u32>(bits, bits >> 4u, bits >> 8u, bits >> 12u) & vec4<u32>(15u);
    return (four * 0x00204081u) & vec4<u32>(0x01010101u);
}

//! if W_VECTORS
// The f16 in the low bits of a word.
fn half_of(word: u32) -> f32 {
    return unpack2x16float(word).x;
}
//! else
fn word(at: u32) -> u32 {
    return w[at >> 2u];
}

fn byte(at: u32) -> u32 {
    return (w[at >> 2u] >> (8u * (at & 3u))) & 255u;
}

// 16 bits at an even address.
fn pair(at: u32) -> u32 {
    return (w[at >> 2u] >> (8u * (at & 2u))) & 0xFFFFu;
}

// The f16 at an even address.
fn half(at: u32) -> f32 {
    return unpack2x16float(pair(at)).x;
}

// 16 bytes at any address, of which the host keeps another word readable.
fn load16(at: u32) -> vec4<u32> {
    let i = at >> 2u;
    let shift = 8u * (at & 3u);
    let low = vec4<u32>(w[i], w[i + 1u], w[i + 2u], w[i + 3u]);
    let high = vec4<u32>(low.yzw, w[i + 4u]);
    return (low >> vec4<u32>(shift)) | ((high << vec4<u32>(1u)) << vec4<u32>(31u - shift));
}
//! end

//! formats q4_k q5_k
// Scale and minimum of sub-block s, from eight six-bit pairs in 12 bytes.
fn scale_min(scales: vec3<u32>, s: u32) -> vec2<f32> {
    let shift = 8u * (s & 3u);
    let low = vec3<u32>(scales.x >> shift, scales.y >> shift, scales.z >> shift);
    let four = vec2<u32>((low.z & 15u) | ((low.x >> 2u) & 48u), ((low.z >> 4u) & 15u) | ((low.y >> 2u) & 48u));
    return vec2<f32>(select(low.xy & vec2<u32>(63u), four, s >= 4u));
}

//! formats iq4_nl iq4_xs
// Values of four codes, with which bytes begin: -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.
fn looked_up(codes: u32, scale: f32) -> vec4<f32> {
    let q = vec4<u32>(codes, codes >> 8u, codes >> 16u, codes >> 24u) & vec4<u32>(15u);
    let bit2 = (q & vec4<u32>(4u)) != vec4<u32>(0u);
    // 128 more than the values, as bytes.
    let low = select(vec4<u32>(0x3F2D1801u), vec4<u32>(0x766A5D4Fu), bit2);
    let high = select(vec4<u32>(0xA6998D81u), vec4<u32>(0xF1D9C5B5u), bit2);
    let four = select(low, high, q >= vec4<u32>(8u));
    let value = (four >> (8u * (q & vec4<u32>(3u)))) & vec4<u32>(255u);
    return scale * (vec4<f32>(value) - vec4<f32>(128.0));
}

fn looked_up16(codes: vec4<u32>, scale: f32) -> mat4x4<f32> {
    return mat4x4<f32>(
        looked_up(codes.x, scale),
        looked_up(codes.y, scale),
        looked_up(codes.z, scale),
        looked_up(codes.w, scale),
    );
}

//! format f32
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
//! if WIDE
    let at = base / 16u + 4u * i;
    return mat4x4<f32>(
        bitcast<vec4<f32>>(w[at]),
        bitcast<vec4<f32>>(w[at + 1u]),
        bitcast<vec4<f32>>(w[at + 2u]),
        bitcast<vec4<f32>>(w[at + 3u]),
    );
//! else
    var values = mat4x4<f32>();
//! for v < 4
//! for c < 4
    if (16u * i + 4u * $vu + $cu < n) {
        values[$v][$c] = bitcast<f32>(w[base / 4u + 16u * i + 4u * $vu + $cu]);
    }
//! end
//! end
    return values;
//! end
}

//! format f16
fn halves(q: vec2<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(q.x), unpack2x16float(q.y));
}

fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
//! if WIDE
    let a = w[base / 16u + 2u * i];
    let b = w[base / 16u + 2u * i + 1u];
    return mat4x4<f32>(halves(a.xy), halves(a.zw), halves(b.xy), halves(b.zw));
//! else
    var values = mat4x4<f32>();
//! for v < 4
//! for c < 4
    if (16u * i + 4u * $vu + $cu < n) {
        values[$v][$c] = half(base + 2u * (16u * i + 4u * $vu + $cu));
    }
//! end
//! end
    return values;
//! end
}

//! format bf16
fn widened(q: vec2<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(q.x << 16u, q.x & 0xFFFF0000u, q.y << 16u, q.y & 0xFFFF0000u));
}

fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
//! if WIDE
    let a = w[base / 16u + 2u * i];
    let b = w[base / 16u + 2u * i + 1u];
    return mat4x4<f32>(widened(a.xy), widened(a.zw), widened(b.xy), widened(b.zw));
//! else
    var values = mat4x4<f32>();
//! for v < 4
//! for c < 4
    if (16u * i + 4u * $vu + $cu < n) {
        values[$v][$c] = bitcast<f32>(pair(base + 2u * (16u * i + 4u * $vu + $cu)) << 16u);
    }
//! end
//! end
    return values;
//! end
}

//! format q8_0
// Blocks of 32 weights, 34 bytes: f16 d, 32 signed bytes.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base + i / 2u * 34u;
    let d = half(block);
    // Signed bytes are unsigned ones with the upper bit turned, less 128.
    return affine(load16(block + 2u + i % 2u * 16u) ^ vec4<u32>(0x80808080u), d, -128.0 * d);
}

//! format q4_0
// Blocks of 32, 18 bytes: f16 d, 16 bytes of nibbles; low ones are weights 0 to 15.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base + i / 2u * 18u;
    let d = half(block);
    return affine(nibbles(load16(block + 2u), i % 2u), d, -8.0 * d);
}

//! format q5_0
// Blocks of 32, 22 bytes: f16 d, 32 high bits, nibbles as in Q4_0.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base + i / 2u * 22u;
    let d = half(block);
    let high = spread(pair(block + 2u + i % 2u * 2u));
    return affine(nibbles(load16(block + 6u), i % 2u) | (high << vec4<u32>(4u)), d, -16.0 * d);
}

//! format q4_k
// Blocks of 256, 144 bytes: f16 d, f16 dmin, 12 bytes of scales, 128 of nibbles, 64 weights in 32 of them.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base / 16u + i / 16u * 9u;
    let s = i % 16u / 2u;
    let head = w[block];
    let sm = scale_min(head.yzw, s);
    let d = unpack2x16float(head.x);
    return affine(nibbles(w[block + 1u + s / 2u * 2u + i % 2u], s % 2u), d.x * sm.x, -(d.y * sm.y));
}

//! format q5_k
// Blocks of 256, 176 bytes: as Q4_K with 32 bytes of high bits before the nibbles, bit s of sub-block s.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base / 16u + i / 16u * 11u;
    let s = i % 16u / 2u;
    let head = w[block];
    let sm = scale_min(head.yzw, s);
    let d = unpack2x16float(head.x);
    let high = (w[block + 1u + i % 2u] >> vec4<u32>(s)) & vec4<u32>(0x01010101u);
    let q = nibbles(w[block + 3u + s / 2u * 2u + i % 2u], s % 2u) | (high << vec4<u32>(4u));
    return affine(q, d.x * sm.x, -(d.y * sm.y));
}

//! format q6_k
// Blocks of 256, 210 bytes: 128 of low nibbles, 64 of high bit pairs, 16 signed scales, f16 d.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base + i / 16u * 210u;
    let h = i % 16u / 8u;
    let j = i % 8u / 2u;
    let at = i % 2u * 16u;
    let low = nibbles(load16(block + 64u * h + 32u * (j % 2u) + at), j / 2u);
    let high = (load16(block + 128u + 32u * h + at) >> vec4<u32>(2u * j)) & vec4<u32>(0x03030303u);
    let d = half(block + 208u) * f32(extractBits(i32(byte(block + 192u + i % 16u)), 0u, 8u));
    return affine(low | (high << vec4<u32>(4u)), d, -32.0 * d);
}

//! format iq4_xs
// Blocks of 256, 136 bytes: f16 d, 8 times 2 high bits and 4 low bits of scales, 128 bytes of nibbles, 32 weights in 16
// of them.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base + i / 16u * 136u;
    let s = i % 16u / 2u;
    let low = (byte(block + 4u + s / 2u) >> (4u * (s % 2u))) & 15u;
    let head = word(block);
    let high = (head >> (16u + 2u * s)) & 3u;
    let d = unpack2x16float(head).x * (f32(low | (high << 4u)) - 32.0);
    let at = block / 4u + 2u + 4u * s;
    let q = vec4<u32>(w[at], w[at + 1u], w[at + 2u], w[at + 3u]);
    return looked_up16(nibbles(q, i % 2u), d);
}

//! format iq4_nl
// Blocks of 32, 18 bytes: f16 d, nibbles as in Q4_0.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base + i / 2u * 18u;
    return looked_up16(nibbles(load16(block + 2u), i % 2u), half(block));
}

//! format mxfp4
// `scale` times the values of four codes, twice which are 0, 1, 2, 3, 4, 6, 8, 12 and the same below zero.
fn fp4(codes: u32, scale: f32) -> vec4<f32> {
    let q = vec4<u32>(codes, codes >> 8u, codes >> 16u, codes >> 24u) & vec4<u32>(15u);
    let value = vec4<f32>((vec4<u32>(0xC8643210u) >> (4u * (q & vec4<u32>(7u)))) & vec4<u32>(15u));
    return scale * select(value, -value, q >= vec4<u32>(8u));
}

// Blocks of 32, 17 bytes: exponent of the scale, nibbles as in Q4_0.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base + i / 2u * 17u;
    let e = byte(block);
    // 2^(e - 128); for the two smallest exponents it is denormal.
    let d = bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u));
    let q = nibbles(load16(block + 1u), i % 2u);
    return mat4x4<f32>(fp4(q.x, d), fp4(q.y, d), fp4(q.z, d), fp4(q.w, d));
}

//! format q1_0
// Blocks of 128, 18 bytes: f16 d, a bit per weight, set where it is positive.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base + i / 8u * 18u;
    let d = half(block);
    return affine(spread(pair(block + 2u + i % 8u * 2u)), 2.0 * d, -d);
}

//! format q2_0
// Blocks of 64, 18 bytes: f16 d, four weights in each byte, the first in its lowest bits.
fn part(base: u32, i: u32, n: u32) -> mat4x4<f32> {
    let block = base + i / 4u * 18u;
    let d = half(block);
    let at = block + 2u + i % 4u * 4u;
    let four = vec4<u32>(byte(at), byte(at + 1u), byte(at + 2u), byte(at + 3u));
    let moved = four | (four << vec4<u32>(6u)) | (four << vec4<u32>(12u)) | (four << vec4<u32>(18u));
    return affine(moved & vec4<u32>(0x03030303u), d, -d);
}
