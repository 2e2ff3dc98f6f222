// Parts of weights as numbers with a scale and an offset that all of them share: `w = scale * number + offset`. A product needs
// the offset once for a part, times the sum of the activations, and the scale once. Numbers are bits of an f16 whose first
// value is near them, so that they become floats in few instructions and little is lost when the offset is subtracted.

// Where the kernel takes several parts at a time, they are parts of a unit of weights that share bytes.
//! formats q8_0 q4_0
fn part_of(unit: u32, h: u32) -> u32 {
    return unit;
}

//! formats q4_0 q4_k
// 16 more than the low (0) or high (1) nibbles of a word.
fn from16(q: u32, high: u32) -> vec4<f32> {
    let even = unpack2x16float(((q << (6u - 4u * high)) & 0x03C003C0u) | 0x4C004C00u);
    let odd = unpack2x16float(((q >> (2u + 4u * high)) & 0x03C003C0u) | 0x4C004C00u);
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

//! format q8_0
// 256 more than the bytes of a word.
fn from256(q: u32) -> vec4<f32> {
    let even = unpack2x16float(((q << 2u) & 0x03FC03FCu) | 0x5C005C00u);
    let odd = unpack2x16float(((q >> 6u) & 0x03FC03FCu) | 0x5C005C00u);
    return vec4<f32>(even.x, odd.x, even.y, odd.y);
}

fn unscaled(base: u32, i: u32, h: u32) -> Unscaled {
    let block = base + i / 2u * 34u;
    let d = half(block);
    let q = load16(block + 2u + i % 2u * 16u) ^ vec4<u32>(0x80808080u);
    return Unscaled(mat4x4<f32>(from256(q.x), from256(q.y), from256(q.z), from256(q.w)), d, -384.0 * d);
}

//! format q4_0
fn unscaled(base: u32, i: u32, h: u32) -> Unscaled {
    let block = base + i / 2u * 18u;
    let d = half(block);
    let q = load16(block + 2u);
    let high = i % 2u;
    let numbers = mat4x4<f32>(from16(q.x, high), from16(q.y, high), from16(q.z, high), from16(q.w, high));
    return Unscaled(numbers, d, -24.0 * d);
}

//! format q4_k
// Both nibbles of 16 bytes.
fn part_of(unit: u32, high: u32) -> u32 {
    return unit / 2u * 4u + unit % 2u + 2u * high;
}

// Scales, then minima, of sub-blocks `2 * g` and `2 * g + 1`.
fn scales_of_two(scales: vec3<u32>, g: u32) -> vec4<f32> {
    let two = scales >> vec3<u32>(16u * (g & 1u));
    let later = vec2<u32>(two.z & 0x0F0Fu, (two.z >> 4u) & 0x0F0Fu) | ((two.xy >> vec2<u32>(2u)) & vec2<u32>(0x3030u));
    let bytes = select(two.xy & vec2<u32>(0x3F3Fu), later, g >= 2u);
    let halves = ((bytes | (bytes << vec2<u32>(8u))) & vec2<u32>(0x00FF00FFu)) | vec2<u32>(0x64006400u);
    return vec4<f32>(unpack2x16float(halves.x), unpack2x16float(halves.y)) - vec4<f32>(1024.0);
}

fn unscaled(base: u32, unit: u32, high: u32) -> Unscaled {
    let block = base / 16u + unit / 8u * 9u;
    let head = w[block];
    let q = w[block + 1u + unit % 8u];
    let d = unpack2x16float(head.x);
    let both = scales_of_two(head.yzw, unit % 8u / 2u);
    let scale = d.x * select(both.x, both.y, high == 1u);
    let minimum = d.y * select(both.z, both.w, high == 1u);
    let numbers = mat4x4<f32>(from16(q.x, high), from16(q.y, high), from16(q.z, high), from16(q.w, high));
    return Unscaled(numbers, scale, fma(-16.0, scale, -minimum));
}

//! format q6_k
// Both nibbles of 16 bytes.
fn part_of(unit: u32, high: u32) -> u32 {
    return unit / 4u * 8u + unit % 4u + 4u * high;
}

// 64 more than the numbers of which a word has low (0) or high (1) nibbles, and `upper` two bits from bit `2 * j` of each
// byte on.
fn from64(q: u32, upper: u32, high: u32, j: u32) -> vec4<f32> {
    let even = ((q << (4u - 4u * high)) & 0x00F000F0u) | ((upper << (8u - 2u * j)) & 0x03000300u) | 0x54005400u;
    let odd = ((q >> (4u + 4u * high)) & 0x00F000F0u) | ((upper >> (2u * j)) & 0x03000300u) | 0x54005400u;
    let a = unpack2x16float(even);
    let b = unpack2x16float(odd);
    return vec4<f32>(a.x, b.x, a.y, b.y);
}

fn unscaled(base: u32, unit: u32, high: u32) -> Unscaled {
    let block = base + unit / 8u * 210u;
    let h = unit % 8u / 4u;
    let j = unit % 4u / 2u;
    let at = unit % 2u * 16u;
    let q = load16(block + 64u * h + 32u * j + at);
    let upper = load16(block + 128u + 32u * h + at);
    let scale = extractBits(i32(byte(block + 192u + part_of(unit % 8u, high))), 0u, 8u);
    let d = half(block + 208u) * f32(scale);
    let k = j + 2u * high;
    let numbers = mat4x4<f32>(
        from64(q.x, upper.x, high, k),
        from64(q.y, upper.y, high, k),
        from64(q.z, upper.z, high, k),
        from64(q.w, upper.w, high, k),
    );
    return Unscaled(numbers, d, -96.0 * d);
}
