// Reductions of logits for sampling, so that only a few values go to the CPU.

// A number in the order of the values: unlike comparisons of floats, which the language lets compilers simplify, integers
// are certain where a value is NaN, which counts as the lowest, and -0 is 0.
fn rank(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return 0u;
    }
    if (bits >= 0x80000000u) {
        return select(~bits, 0x80000000u, bits == 0x80000000u);
    }
    return bits | 0x80000000u;
}

//! kernel argmax
// Index of the largest value of each row, the lowest among equals; NaN is never chosen.
var<workgroup> ranks: array<u32, 256>;
var<workgroup> indices: array<u32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = group.x;
    var best = 0u;
    var at = 0xFFFFFFFFu;
    for (var i = t; i < p.n; i += 256u) {
        let mine = rank(x[p.x_at + row * p.n + i]);
        if (mine > best) {
            best = mine;
            at = i;
        }
    }
    ranks[t] = best;
    indices[t] = at;
    for (var width = 128u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (t < width) {
            let other = ranks[t + width];
            let other_at = indices[t + width];
            if (other > best || (other == best && other_at < at)) {
                best = other;
                at = other_at;
                ranks[t] = best;
                indices[t] = at;
            }
        }
    }
    if (t == 0u) {
        index[p.index_at + row] = select(at, 0u, at == 0xFFFFFFFFu);
    }
}

//! kernel softmax
// `x = e^(x - max) / sum` of each row, in place.
var<workgroup> numbers: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let origin = p.x_at + group.x * p.n;
    var largest = MASKED;
    for (var i = t; i < p.n; i += 256u) {
        largest = max(largest, x[origin + i]);
    }
    numbers[t] = largest;
    for (var width = 128u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (t < width) {
            numbers[t] = max(numbers[t], numbers[t + width]);
        }
    }
    workgroupBarrier();
    largest = numbers[0];
    workgroupBarrier(); // `numbers` are read
    var sum = 0.0;
    for (var i = t; i < p.n; i += 256u) {
        let e = exp_negative(x[origin + i] - largest);
        x[origin + i] = e;
        sum += e;
    }
    numbers[t] = sum;
    for (var width = 128u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (t < width) {
            numbers[t] += numbers[t + width];
        }
    }
    workgroupBarrier();
    sum = numbers[0];
    for (var i = t; i < p.n; i += 256u) {
        x[origin + i] /= sum;
    }
}

//! kernel-group top_k top_k_pairs
// Pairs of rank and index that a workgroup sorts.
var<workgroup> ranks: array<u32, 1024>;
var<workgroup> indices: array<u32, 1024>;

// The value of a rank; the lowest finite one for NaN.
fn ranked(rank: u32) -> f32 {
    return bitcast<f32>(select(~max(rank, 0x00800000u), rank & 0x7FFFFFFFu, rank >= 0x80000000u));
}

// Sorts the pairs by descending value, then ascending index (bitonic sort).
fn sort_pairs(t: u32) {
    for (var size = 2u; size <= 1024u; size *= 2u) {
        for (var distance = size / 2u; distance > 0u; distance /= 2u) {
            workgroupBarrier();
            for (var i = t; i < 512u; i += 256u) {
                let a = i / distance * 2u * distance + i % distance;
                let b = a + distance;
                let swapped = ranks[b] > ranks[a] || (ranks[b] == ranks[a] && indices[b] < indices[a]);
                if (swapped == ((a & size) == 0u)) {
                    let rank_a = ranks[a];
                    let index_a = indices[a];
                    ranks[a] = ranks[b];
                    indices[a] = indices[b];
                    ranks[b] = rank_a;
                    indices[b] = index_a;
                }
            }
        }
    }
    workgroupBarrier();
}

// Writes the first k pairs, `(n_rows, chunks, k)`.
fn write_top(group: vec3<u32>, t: u32) {
    let to = (group.y * ((p.n + 1023u) / 1024u) + group.x) * p.k;
    for (var i = t; i < p.k; i += 256u) {
        top_values[p.top_values_at + to + i] = ranked(ranks[i]);
        top_indices[p.top_indices_at + to + i] = indices[i];
    }
}

//! kernel top_k
// The k largest of each 1024 values of a row, in order; missing ones have index 2^32 - 1.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    for (var i = t; i < 1024u; i += 256u) {
        let at = group.x * 1024u + i;
        ranks[i] = 0x00800000u;
        indices[i] = 0xFFFFFFFFu;
        if (at < p.n) {
            ranks[i] = max(rank(x[p.x_at + group.y * p.n + at]), 0x00800000u);
            indices[i] = at;
        }
    }
    sort_pairs(t);
    write_top(group, t);
}

//! kernel top_k_pairs
// The k largest pairs of each 1024 pairs that an earlier pass wrote.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    for (var i = t; i < 1024u; i += 256u) {
        let at = group.x * 1024u + i;
        ranks[i] = 0x00800000u;
        indices[i] = 0xFFFFFFFFu;
        if (at < p.n) {
            ranks[i] = max(rank(x[p.x_at + group.y * p.n + at]), 0x00800000u);
            indices[i] = x_indices[p.x_indices_at + group.y * p.n + at];
        }
    }
    sort_pairs(t);
    write_top(group, t);
}
