// Attention of prompts. A workgroup of 128 takes one query head of up to TILE_ROWS rows of one sequence, and the keys a
// page at a time: a thread computes `ROWS_EACH` rows of the scores by 4 keys, then of the output by 4 * VECTORS_EACH
// columns. Queries and keys are in workgroup memory 16 columns at a time, values KEYS keys at a time. The order of a row's
// sums does not depend on what it sees: keys that it does not see add zeros.
//! use pages slabs scores

// Rows of four vectors, of which vector c of row r is at `4 * r + (c ^ (r / 2 % 4))`, so that threads which read the same
// columns of successive rows use different banks: queries, then from 128 on keys; or values.
var<workgroup> panel: array<vec4<f32>, 384>;
// Scores and weights of a page's keys, rows 65 apart.
var<workgroup> scores: array<f32, $SCORES>;
// A number of each thread, and of each row.
var<workgroup> numbers: array<f32, 128>;
var<workgroup> factors: array<f32, $TILE_ROWS>;

//! kernel attention_prompt
// `q` is `(n_rows, n_head, head_dim)`, `out` `(n_rows, n_head, head_dim_v)`; sinks as in `attention_merge`. `VALUES`
// is the largest width of a value head, 128, 256 or 512. A tile is its first row and their number.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let tile = tiles[p.tiles_at + group.x];
    let first = tile.x;
    let n_rows = tile.y;
    let head = group.y;
    let kv_head = head / (p.n_head / p.n_head_kv);
    let table = p.pages_at + rows[p.rows_at + first].y;
    var start = 0xFFFFFFFFu;
    var stop = 0u;
    for (var i = 0u; i < n_rows; i++) {
        let pos = rows[p.rows_at + first + i].x;
        start = min(start, first_seen(pos));
        stop = max(stop, pos + 1u);
    }
    let tx = t % 16u;
    let ty = t / 16u;

    // Row of a thread in the softmax, with the same numbers in all of its threads.
    let team = 128u / $TILE_ROWSu;
    let my_row = t / team;
    let my_pos = rows[p.rows_at + first + min(my_row, n_rows - 1u)].x;
    let my_first = first_seen(my_pos);
    let slope = slope_of(head);
    var largest = MASKED;
    var total = 0.0;
    // Rows ROWS_EACH * ty + i, columns 4 * (tx + 16 * v).
//! for i < ROWS_EACH
//! for v < VECTORS_EACH
    var sum_$i_$v = vec4<f32>();
//! end
//! end

    for (var page = start / PAGE_POSITIONS; page * PAGE_POSITIONS < stop; page++) {
        let place = pages[table + page];
        let keys = place.y + (p.key_offset + kv_head * block_bytes(p.key_bits, p.head_dim)) / 4u;
        let values = place.y + (p.value_offset + kv_head * block_bytes(p.value_bits, p.head_dim_v)) / 4u;
        let filled = min(stop - page * PAGE_POSITIONS, PAGE_POSITIONS);
//! for i < ROWS_EACH
//! for j < 4
        var score_$i_$j = 0.0;
//! end
//! end
        for (var column = 0u; column < p.head_dim; column += 16u) {
            let c = column + t % 4u * 4u;
            workgroupBarrier(); // the panel before is read
            if (t / 4u < $TILE_ROWSu) {
                var query = vec4<f32>();
                if (t / 4u < n_rows && c < p.head_dim) {
                    let at = p.q_at + ((first + t / 4u) * p.n_head + head) * p.head_dim + c;
                    query = p.scale * vec4<f32>(q[at], q[at + 1u], q[at + 2u], q[at + 3u]);
                }
                panel[t / 4u * 4u + ((t % 4u) ^ (t / 8u % 4u))] = query;
            }
//! for h < 2
            {
                let key = t / 4u + 32u * $hu;
                var k = vec4<f32>();
                if (key < filled && c < p.head_dim) {
                    k = load4(place.x, keys, p.key_bits, p.head_dim, key, c);
                }
                panel[128u + key * 4u + ((t % 4u) ^ (t / 8u % 4u))] = k;
            }
//! end
            workgroupBarrier();
            for (var v = 0u; v < 4u; v++) {
//! for i < ROWS_EACH
                let q_$i = panel[($ROWS_EACHu * ty + $iu) * 4u + (v ^ (($ROWS_EACHu * ty + $iu) / 2u % 4u))];
//! end
//! for j < 4
                let k_$j = panel[128u + (tx + 16u * $ju) * 4u + (v ^ (tx / 2u % 4u))];
//! for i < ROWS_EACH
                score_$i_$j = fma(q_$i.w, k_$j.w, fma(q_$i.z, k_$j.z, fma(q_$i.y, k_$j.y, fma(q_$i.x, k_$j.x, score_$i_$j))));
//! end
//! end
            }
        }
//! for i < ROWS_EACH
//! for j < 4
        scores[($ROWS_EACHu * ty + $iu) * 65u + tx + 16u * $ju] = score_$i_$j;
//! end
//! end
        workgroupBarrier();

        var most = MASKED;
        for (var i = t % team; i < 64u; i += team) {
            let key = page * PAGE_POSITIONS + i;
            let at = my_row * 65u + i;
            var score = MASKED;
            if (my_row < n_rows && my_first <= key && key <= my_pos) {
                score = score_of(scores[at], slope, my_pos - key);
            }
            scores[at] = score;
            most = max(most, score);
        }
        numbers[t] = most;
        workgroupBarrier();
        let before = largest;
        for (var i = 0u; i < team; i++) {
            largest = max(largest, numbers[my_row * team + i]);
        }
        workgroupBarrier(); // `numbers` are read
        var sum = 0.0;
        for (var i = t % team; i < 64u; i += team) {
            let at = my_row * 65u + i;
            let score = scores[at];
            // A row that sees nothing of this page may not have seen anything yet.
            let weight = select(0.0, exp_negative(score - largest), score > MASKED);
            scores[at] = weight;
            sum += weight;
        }
        numbers[t] = sum;
        let shrink = exp_negative(before - largest);
        if (t % team == 0u) {
            factors[my_row] = shrink;
        }
        workgroupBarrier();
        total *= shrink;
        for (var i = 0u; i < team; i++) {
            total += numbers[my_row * team + i];
        }

//! for i < ROWS_EACH
//! for v < VECTORS_EACH
        sum_$i_$v *= factors[$ROWS_EACHu * ty + $iu];
//! end
//! end
        for (var key = 0u; key < filled; key += $KEYSu) {
            workgroupBarrier(); // the panel before is read
//! for h < 2
            {
                let mine = key + (t + 128u * $hu) / ($VALUESu / 4u);
                let c = (t + 128u * $hu) % ($VALUESu / 4u) * 4u;
                var value = vec4<f32>();
                if (mine < filled && c < p.head_dim_v) {
                    value = load4(place.x, values, p.value_bits, p.head_dim_v, mine, c);
                }
                panel[t + 128u * $hu] = value;
            }
//! end
            workgroupBarrier();
//! for k < KEYS
//! for i < ROWS_EACH
            let weight_$k_$i = vec4<f32>(scores[($ROWS_EACHu * ty + $iu) * 65u + key + $ku]);
//! end
//! for v < VECTORS_EACH
            {
                let value = panel[$ku * ($VALUESu / 4u) + tx + 16u * $vu];
//! for i < ROWS_EACH
                sum_$i_$v = fma(weight_$k_$i, value, sum_$i_$v);
//! end
            }
//! end
//! end
        }
    }

    let sink = sinks[p.sinks_at + head];
    let most = max(largest, sink);
    let weight = exp_negative(largest - most);
    workgroupBarrier(); // factors are read
    if (t % team == 0u) {
        factors[my_row] = weight / fma(total, weight, exp_negative(sink - most));
    }
    workgroupBarrier();
//! for i < ROWS_EACH
    if ($ROWS_EACHu * ty + $iu < n_rows) {
        let factor = factors[$ROWS_EACHu * ty + $iu];
        let to = p.out_at + ((first + $ROWS_EACHu * ty + $iu) * p.n_head + head) * p.head_dim_v;
//! for v < VECTORS_EACH
        {
            let c = 4u * (tx + 16u * $vu);
            let value = factor * sum_$i_$v;
            if (c < p.head_dim_v) {
                out[to + c] = value.x;
                out[to + c + 1u] = value.y;
                out[to + c + 2u] = value.z;
                out[to + c + 3u] = value.w;
            }
        }
//! end
    }
//! end
}
