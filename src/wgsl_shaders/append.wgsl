// Appends keys and values of a pass to the pages of its sequences.
//! use pages to_half

// Groups of smaller values are stored as zeros.
const TINY: f32 = 1e-30;

var<workgroup> magnitudes: array<u32, 128>;
var<workgroup> codes: array<u32, 128>;

fn store_word(slab: u32, at: u32, word: u32) {
//! for s < SLABS
    if (slab == $su) {
        atomicStore(&slab_$s[at], word);
    }
//! end
}

// Stores 16 bits of a word whose other half another thread may store at the same time.
fn store_half(slab: u32, at: u32, upper: bool, half: u32) {
    let keep = select(0xFFFF0000u, 0x0000FFFFu, upper);
    let bits = select(half, half << 16u, upper);
//! for s < SLABS
    if (slab == $su) {
        atomicAnd(&slab_$s[at], keep);
        atomicOr(&slab_$s[at], bits);
    }
//! end
}

// Word `i` of the bits from `shift` on of a group's codes, `width` of each, packed as `unpacked` reads them.
fn packed(first: u32, i: u32, width: u32, shift: u32) -> u32 {
    var word = 0u;
    for (var j = 0u; j < 4u; j++) {
        for (var m = 0u; m < 8u / width; m++) {
            let code = codes[first + 4u * i + j + m * 4u * width];
            word |= ((code >> shift) & ((1u << width) - 1u)) << (8u * j + width * m);
        }
    }
    return word;
}

//! kernel append
// `keys` is `(n_rows, n_head_kv, head_dim)`, `values` likewise. A team of 32 threads takes 32 values of a head. The
// layer's offsets within a page are in bytes.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let lane = t % 32u;
    let team = t - lane;
    let key_groups = (p.head_dim + GROUP - 1u) / GROUP;
    let value_groups = (p.head_dim_v + GROUP - 1u) / GROUP;
    let n_keys = p.n_head_kv * key_groups;
    let number = 4u * at.x + t / 32u;
    let exists = number < n_keys + p.n_head_kv * value_groups;
    let of_keys = number < n_keys;
    let i = select(number - n_keys, number, of_keys);
    let groups = select(value_groups, key_groups, of_keys);
    let dim = select(p.head_dim_v, p.head_dim, of_keys);
    let bits = select(p.value_bits, p.key_bits, of_keys);
    let head = i / groups;
    let c = GROUP * (i % groups) + lane;
    let origin = (at.y * p.n_head_kv + head) * dim + c;
    var x = 0.0;
    var next = 0.0;
    if (exists && c < dim) {
        if (of_keys) {
            x = keys[p.keys_at + origin];
        } else {
            x = values[p.values_at + origin];
        }
    }
    if (exists && c + 1u < dim) {
        if (of_keys) {
            next = keys[p.keys_at + origin + 1u];
        } else {
            next = values[p.values_at + origin + 1u];
        }
    }

    let magnitude = bitcast<u32>(x) & 0x7FFFFFFFu;
    magnitudes[t] = magnitude;
    for (var width = 16u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (lane < width) {
            magnitudes[t] = max(magnitudes[t], magnitudes[t + width]);
        }
    }
    workgroupBarrier();
    let largest = magnitudes[team];
    // A 128th of the largest magnitude, rounded up to bf16.
    var scale = (bitcast<u32>(bitcast<f32>(largest) * 0.0078125) + 0xFFFFu) >> 16u;
    var code = 128u;
    if (largest >= 0x7F800000u) { // not finite: the group becomes NaN
        scale = 0x7FC0u;
    } else if (bitcast<f32>(largest) < TINY) {
        scale = 0u;
    } else {
        // The largest value itself would be code 256.
        code = u32(min(fma(x, 1.0 / bitcast<f32>(scale << 16u), 128.0), 255.0));
    }
    codes[t] = code;
    workgroupBarrier();
    if (!exists) {
        return;
    }

    let row = rows[p.rows_at + at.y];
    let slot = row.x % PAGE_POSITIONS;
    let page = pages[p.pages_at + row.y + row.x / PAGE_POSITIONS];
    let offset = select(p.value_offset, p.key_offset, of_keys);
    let block = page.y + (offset + head * block_bytes(bits, dim)) / 4u;
    if (bits == F16_BITS) {
        if (c < dim && c % 2u == 0u) {
            store_word(page.x, block + (slot * dim + c) / 2u, to_half(x) | (to_half(next) << 16u));
        }
        return;
    }
    let to = planes(block, bits, dim);
    let group = slot * groups + i % groups;
    let width = bits - 4u;
    if (lane < 4u) {
        store_word(page.x, to.upper + 4u * group + lane, packed(team, lane, 4u, 4u));
    }
    if (lane < width) {
        store_word(page.x, to.lower + width * group + lane, packed(team, lane, width, 8u - bits));
    }
    if (lane == 0u) {
        store_half(page.x, to.scales + group / 2u, group % 2u == 1u, scale);
    }
}

