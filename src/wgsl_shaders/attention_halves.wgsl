// Attention of generated tokens as in attention_decode.wgsl, over pages in f16: threads next to each other read 16 bytes each
// that are next to each other.
//! use pages

// Queries of G heads as vectors, then the sums of values.
var<workgroup> vectors: array<vec4<f32>, $VECTORS>;
// Products of four parts of each key's columns, `(G, 64)`; then the first number of four is a score, and a weight.
var<workgroup> scores: array<vec4<f32>, $SCORES>;
// Sums of values of two heads, two vectors per thread.
var<workgroup> sums: array<vec4<f32>, 512>;
// A number of each thread.
var<workgroup> numbers: array<vec4<f32>, 32>;
var<workgroup> shrinks: array<f32, $G>;
// Of each head the largest score and the sum of weights.
var<workgroup> ends: array<vec2<f32>, $G>;

// Eight values in f16.
fn load8(slab: u32, at: u32) -> vec4<u32> {
//! for s < LAST_SLAB
    if (slab == $su) {
        return slab_$s[at];
    }
//! end
    return slab_$LAST_SLAB[at];
}

fn first_half(eight: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(eight.x), unpack2x16float(eight.y));
}

fn second_half(eight: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(eight.z), unpack2x16float(eight.w));
}

fn dot4(a: vec4<f32>, b: vec4<f32>, start: f32) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, start))));
}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
//! include attention_begin
    // Columns 8 * lane of values, summed over every `n_lines`th key.
    let lanes = p.head_dim_v / 8u;
    let n_lines = 128u / lanes;
    let line = t / lanes;
    let lane = t % lanes;
//! for g < G
    var sum_$g = vec4<f32>();
    var more_$g = vec4<f32>();
//! end

    for (var page = start / PAGE_POSITIONS; page * PAGE_POSITIONS < stop; page++) {
        let place = pages[p.pages_at + row.y + page];
        let keys = place.y / 4u + (p.key_offset + kv_head * block_bytes(F16_BITS, p.head_dim)) / 16u;
        let values = place.y / 4u + (p.value_offset + kv_head * block_bytes(F16_BITS, p.head_dim_v)) / 16u;
        let low = max(start, page * PAGE_POSITIONS) - page * PAGE_POSITIONS;
        let high = min(stop - page * PAGE_POSITIONS, PAGE_POSITIONS);
        workgroupBarrier(); // queries are written, weights of the page before are read

        // Four threads share a key, and take eight of its columns in turn, two of these at a time.
        let eights = p.head_dim / 8u;
        for (var key = t / 4u; key < high; key += 32u) {
//! for g < G
            var product_$g = 0.0;
//! end
            for (var c = t % 4u; c < eights; c += 8u) {
                let a = load8(place.x, keys + key * eights + c);
                var b = load8(place.x, keys + key * eights + min(c + 4u, eights - 1u));
                if (c + 4u >= eights) {
                    b = vec4<u32>();
                }
//! for g < G
                if ($gu < heads) {
                    let at = $gu * ($Du / 4u) + 2u * c;
                    product_$g = dot4(second_half(a), vectors[at + 1u], dot4(first_half(a), vectors[at], product_$g));
                    let behind = min(at + 8u, $VECTORSu - 2u);
                    product_$g = dot4(second_half(b), vectors[behind + 1u], dot4(first_half(b), vectors[behind], product_$g));
                }
//! end
            }
//! for g < G
            scores[$gu * 64u + key][t % 4u] = product_$g;
//! end
        }
        workgroupBarrier();

        // Each thread scores some keys of its head.
        var most = MASKED;
        for (var i = t % team; i < 64u; i += team) {
            let at = my_head * 64u + i;
            var score = MASKED;
            if (low <= i && i < high) {
                let four = scores[at];
                score = score_of((four.x + four.y) + (four.z + four.w), slope, pos - page * PAGE_POSITIONS - i);
            }
            scores[at].x = score;
            most = max(most, score);
        }
        numbers[t / 4u][t % 4u] = most;
        workgroupBarrier();
        let before = largest;
        for (var i = my_head * team / 4u; i < (my_head + 1u) * team / 4u; i++) {
            let four = numbers[i];
            largest = max(largest, max(max(four.x, four.y), max(four.z, four.w)));
        }
        workgroupBarrier(); // `numbers` are read
        var sum = 0.0;
        for (var i = t % team; i < 64u; i += team) {
            let weight = exp_negative(scores[my_head * 64u + i].x - largest);
            scores[my_head * 64u + i].x = weight;
            sum += weight;
        }
        numbers[t / 4u][t % 4u] = sum;
        let shrink = exp_negative(before - largest);
        if (t % team == 0u) {
            shrinks[my_head] = shrink;
        }
        workgroupBarrier();
        var all = vec4<f32>();
        for (var i = my_head * team / 4u; i < (my_head + 1u) * team / 4u; i++) {
            all += numbers[i];
        }
        total = fma(total, shrink, (all.x + all.y) + (all.z + all.w));

//! for g < G
        sum_$g *= shrinks[$g];
        more_$g *= shrinks[$g];
//! end
        // Four keys at a time; behind the end the last one stands for those that are missing, without weight.
        if (line < n_lines) {
            for (var i = line; i < high; i += 4u * n_lines) {
//! for k < 4
                let key_$k = min(i + $ku * n_lines, high - 1u);
                let eight_$k = load8(place.x, values + key_$k * lanes + lane);
//! end
//! for k < 4
//! for g < G
                {
                    let weight = vec4<f32>(select(0.0, scores[$gu * 64u + key_$k].x, i + $ku * n_lines < high));
                    sum_$g = fma(weight, first_half(eight_$k), sum_$g);
                    more_$g = fma(weight, second_half(eight_$k), more_$g);
                }
//! end
//! end
            }
        }
    }

    // Adds the sums of the lines, one after the other.
//! for g < G
    sums[$gu % 2u * 256u + 2u * t] = sum_$g;
    sums[$gu % 2u * 256u + 2u * t + 1u] = more_$g;
    workgroupBarrier();
    if (t < 2u * lanes) {
        var sum = vec4<f32>();
        for (var i = 0u; i < n_lines; i++) {
            sum += sums[$gu % 2u * 256u + 2u * lanes * i + t];
        }
        vectors[$gu * ($Du / 4u) + t] = sum;
    }
//! end
//! include attention_end
