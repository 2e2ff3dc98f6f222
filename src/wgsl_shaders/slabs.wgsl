// Reading of pages.

fn page_word(slab: u32, at: u32) -> u32 {
//! for s < LAST_SLAB
    if (slab == $su) {
        return slab_$s[at];
    }
//! end
    return slab_$LAST_SLAB[at];
}

// Bits of four values that are next to each other, one per byte: value j of a group has `width` (1, 2 or 4) bits in byte
// `j % (4 * width)`, from bit `width * (j / (4 * width))` on. `group` is its first word, `j` a multiple of 4.
fn unpacked(slab: u32, group: u32, width: u32, j: u32) -> u32 {
    let four = page_word(slab, group + ((j & (4u * width - 1u)) >> 2u));
    return (four >> (width * ((j >> 2u) >> (width >> 1u)))) & (((1u << width) - 1u) * 0x01010101u);
}

// Values c .. c + 4 of a row of the block at word `block`; `c` is a multiple of 4, rows of f16 have an even number of
// values.
fn load4(slab: u32, block: u32, bits: u32, dim: u32, row: u32, c: u32) -> vec4<f32> {
    if (bits == F16_BITS) {
        let at = block + (row * dim + c) / 2u;
        return vec4<f32>(unpack2x16float(page_word(slab, at)), unpack2x16float(page_word(slab, at + 1u)));
    }
    let origin = planes(block, bits, dim);
    let group = row * ((dim + GROUP - 1u) / GROUP) + c / GROUP;
    let j = c % GROUP;
    let width = bits - 4u;
    var codes = unpacked(slab, origin.upper + 4u * group, 4u, j);
    if (width != 0u) {
        codes = (codes << width) | unpacked(slab, origin.lower + width * group, width, j);
    }
    // A code stands for the middle of its interval.
    let pair = page_word(slab, origin.scales + group / 2u);
    let scale = bitcast<f32>(select(pair << 16u, pair & 0xFFFF0000u, group % 2u == 1u)) * f32(1u << (8u - bits));
    let numbers = vec4<f32>(vec4<u32>(codes, codes >> 8u, codes >> 16u, codes >> 24u) & vec4<u32>(255u));
    return (numbers - vec4<f32>(0.5 * f32((1u << bits) - 1u))) * scale;
}

// Values `c[i] .. + 4` of rows `row[i]`, of which all are read before one is used.
fn load4x4(slab: u32, block: u32, bits: u32, dim: u32, row: vec4<u32>, c: vec4<u32>) -> mat4x4<f32> {
    if (bits == F16_BITS) {
        let at = vec4<u32>(block) + (row * vec4<u32>(dim) + c) / vec4<u32>(2u);
        let a = vec4<u32>(page_word(slab, at.x), page_word(slab, at.y), page_word(slab, at.z), page_word(slab, at.w));
        let b = vec4<u32>(
            page_word(slab, at.x + 1u),
            page_word(slab, at.y + 1u),
            page_word(slab, at.z + 1u),
            page_word(slab, at.w + 1u),
        );
        return mat4x4<f32>(
            vec4<f32>(unpack2x16float(a.x), unpack2x16float(b.x)),
            vec4<f32>(unpack2x16float(a.y), unpack2x16float(b.y)),
            vec4<f32>(unpack2x16float(a.z), unpack2x16float(b.z)),
            vec4<f32>(unpack2x16float(a.w), unpack2x16float(b.w)),
        );
    }
    return mat4x4<f32>(
        load4(slab, block, bits, dim, row.x, c.x),
        load4(slab, block, bits, dim, row.y, c.y),
        load4(slab, block, bits, dim, row.z, c.z),
        load4(slab, block, bits, dim, row.w, c.w),
    );
}
