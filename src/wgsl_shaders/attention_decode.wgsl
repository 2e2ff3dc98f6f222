// Attention of generated tokens. A workgroup of 128 takes one row, up to G query heads of one key/value head, and one
// split of the keys, a page at a time; a second kernel merges the splits in order. `attention_single` is both, where no row of
// a pass has a second split.

// Positions per split of the keys. Splits begin at multiples of this, wherever a sequence ends.
const SPLIT: u32 = 128u;
//! use scores

// A sum of weighted values over the sum of weights.
fn weighted(sum: f32, total: f32) -> f32 {
    return sum * (1.0 / total);
}

//! kernel-group attention_decode attention_single
//! if HALVES
//! use attention_halves
//! else
//! use pages slabs

// Queries of G heads as vectors, then the sums of values.
var<workgroup> vectors: array<vec4<f32>, $VECTORS>;
// Products of a half of each key's columns, `(2, G, 64)`, then in the first half scores and weights.
var<workgroup> scores: array<f32, 1024>;
// A number of each thread.
var<workgroup> numbers: array<f32, 128>;
var<workgroup> shrinks: array<f32, $G>;
// Of each head the largest score and the sum of weights.
var<workgroup> ends: array<vec2<f32>, $G>;

// Writes for each head and split the weighted sum of values, the largest score and the sum of weights: `partial` is
// `(n_rows, n_head, n_splits, head_dim_v + 2)`. `D` is the largest head width, 128, 256, 512 or, with up to
// 512 values, 576.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
//! include attention_begin
    // Columns 4 * (lane + 32 * v) of each head, summed over a quarter of a page's keys.
    let lane = t % 32u;
    let quarter = t / 32u;
//! for g < G
//! for v < WIDTH
    var sum_$g_$v = vec4<f32>();
//! end
//! end

    for (var page = start / PAGE_POSITIONS; page * PAGE_POSITIONS < stop; page++) {
        let place = pages[p.pages_at + row.y + page];
        let keys = place.y + (p.key_offset + kv_head * block_bytes(p.key_bits, p.head_dim)) / 4u;
        let values = place.y + (p.value_offset + kv_head * block_bytes(p.value_bits, p.head_dim_v)) / 4u;
        let low = max(start, page * PAGE_POSITIONS) - page * PAGE_POSITIONS;
        let high = min(stop - page * PAGE_POSITIONS, PAGE_POSITIONS);
        workgroupBarrier(); // queries are written, weights of the page before are read

        // Two threads share a key, and take eight of its columns in turn.
        let key = t / 2u;
        let visible = low <= key && key < high;
//! for g < G
        var product_$g = 0.0;
//! end
        var c = t % 2u * 8u;
        for (; c + 56u <= p.head_dim && visible; c += 64u) {
            let columns = vec4<u32>(c, c + 16u, c + 32u, c + 48u);
//! for h < 2
            let four_$h = load4x4(place.x, keys, p.key_bits, p.head_dim, vec4<u32>(key), columns + vec4<u32>(4u * $hu));
//! end
//! for s < 4
//! for h < 2
//! for g < G
            if ($gu < heads) {
                let k = four_$h[$s];
                let v = vectors[$gu * ($Du / 4u) + c / 4u + 4u * $su + $hu];
                product_$g = fma(v.w, k.w, fma(v.z, k.z, fma(v.y, k.y, fma(v.x, k.x, product_$g))));
            }
//! end
//! end
//! end
        }
        for (; c < p.head_dim && visible; c += 16u) {
//! for h < 2
            if (c + 4u * $hu < p.head_dim) {
                let k = load4(place.x, keys, p.key_bits, p.head_dim, key, c + 4u * $hu);
//! for g < G
                if ($gu < heads) {
                    let v = vectors[$gu * ($Du / 4u) + c / 4u + $hu];
                    product_$g = fma(v.w, k.w, fma(v.z, k.z, fma(v.y, k.y, fma(v.x, k.x, product_$g))));
                }
//! end
            }
//! end
        }
//! for g < G
        scores[(t % 2u * $Gu + $gu) * 64u + key] = product_$g;
//! end
        workgroupBarrier();

        // Each thread scores some keys of its head.
        var most = MASKED;
        for (var i = t % team; i < 64u; i += team) {
            let at = my_head * 64u + i;
            var score = MASKED;
            if (low <= i && i < high) {
                score = score_of(scores[at] + scores[$Gu * 64u + at], slope, pos - page * PAGE_POSITIONS - i);
            }
            scores[at] = score;
            most = max(most, score);
        }
        numbers[t] = most;
        workgroupBarrier();
        let before = largest;
        for (var i = 0u; i < team; i++) {
            largest = max(largest, numbers[my_head * team + i]);
        }
        workgroupBarrier(); // `numbers` are read
        var sum = 0.0;
        for (var i = t % team; i < 64u; i += team) {
            let at = my_head * 64u + i;
            let weight = exp_negative(scores[at] - largest);
            scores[at] = weight;
            sum += weight;
        }
        numbers[t] = sum;
        let shrink = exp_negative(before - largest);
        if (t % team == 0u) {
            shrinks[my_head] = shrink;
        }
        workgroupBarrier();
        total *= shrink;
        for (var i = 0u; i < team; i++) {
            total += numbers[my_head * team + i];
        }

//! for g < G
//! for v < WIDTH
        sum_$g_$v *= shrinks[$g];
//! end
//! end
        // Four keys at a time; behind the end the last one stands for those that are missing, without weight.
        let end = min(high, 16u * quarter + 16u);
        for (var i = max(low, 16u * quarter); i < end; i += 4u) {
            let four = min(vec4<u32>(i, i + 1u, i + 2u, i + 3u), vec4<u32>(end - 1u));
//! for v < WIDTH
            {
                let c = 4u * (lane + 32u * $vu);
                if (c < p.head_dim_v) {
                    let of_four = load4x4(place.x, values, p.value_bits, p.head_dim_v, four, vec4<u32>(c));
//! for k < 4
//! for g < G
                    sum_$g_$v = fma(vec4<f32>(select(0.0, scores[$gu * 64u + i + $ku], i + $ku < end)), of_four[$k], sum_$g_$v);
//! end
//! end
                }
            }
//! end
        }
    }

    // Adds the sums of the four quarters, one after the other.
    for (var s = 0u; s < 4u; s++) {
        workgroupBarrier(); // queries are read, sums before are written
        if (s == quarter) {
//! for g < G
//! for v < WIDTH
            {
                let at = $gu * ($Du / 4u) + lane + 32u * $vu;
                if (s == 0u) {
                    vectors[at] = sum_$g_$v;
                } else {
                    vectors[at] += sum_$g_$v;
                }
            }
//! end
//! end
        }
    }
//! include attention_end
//! end

//! kernel attention_merge
// Merges the splits to `out`, `(n_rows, n_head, head_dim_v)`. A sink is a score without a value that takes part in the
// softmax; a head without one has -1e30.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let pos = rows[p.rows_at + group.y].x;
    let n = pos / SPLIT - first_seen(pos) / SPLIT + 1u;
    let stride = p.head_dim_v + 2u;
    let head = group.y * p.n_head + group.x;
    let at = p.partial_at + head * p.n_splits * stride;
    let sink = sinks[p.sinks_at + group.x];
    var largest = sink;
    for (var s = 0u; s < n; s++) {
        largest = max(largest, partial[at + s * stride + p.head_dim_v]);
    }
    var total = exp_negative(sink - largest);
    for (var s = 0u; s < n; s++) {
        let weight = exp_negative(partial[at + s * stride + p.head_dim_v] - largest);
        total = fma(weight, partial[at + s * stride + p.head_dim_v + 1u], total);
    }
    for (var c = t; c < p.head_dim_v; c += 128u) {
        var sum = 0.0;
        for (var s = 0u; s < n; s++) {
            let weight = exp_negative(partial[at + s * stride + p.head_dim_v] - largest);
            sum = fma(weight, partial[at + s * stride + c], sum);
        }
        out[p.out_at + head * p.head_dim_v + c] = weighted(sum, total);
    }
}
