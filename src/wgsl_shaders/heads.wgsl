// What happens to heads between products and attention, for rows of which nothing else is to be done: norms of single heads,
// rotary positions, keys and values to the pages in f16. Each step computes what the kernel for it alone does.
//! use pages to_half

//! kernel heads
// A head.
var<workgroup> head: array<f32, 512>;
var<workgroup> sums: array<f32, 32>;

// `q`, `k` and `v` are `(n_rows, heads, values)`. A workgroup takes a head of a row: of the queries, then of the keys, then of
// the values.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    // Read first, as one place depends on the other.
    let row = rows[p.rows_at + group.y];
    let page = pages[p.pages_at + row.y + row.x / PAGE_POSITIONS];
    let of_queries = group.x < p.n_head;
    let of_values = group.x >= p.n_head + p.n_head_kv;
    var number = group.x;
    if (!of_queries) {
        number -= p.n_head;
    }
    if (of_values) {
        number -= p.n_head_kv;
    }
    let n = select(p.head_dim, p.head_dim_v, of_values);
    let at = (group.y * select(p.n_head_kv, p.n_head, of_queries) + number) * n;
    for (var i = t; i < n; i += 128u) {
        if (of_queries) {
            head[i] = q[p.q_at + at + i];
        } else if (of_values) {
            head[i] = v[p.v_at + at + i];
        } else {
            head[i] = k[p.k_at + at + i];
        }
    }
    workgroupBarrier();
//! if NORMS
    if (!of_values) {
        if (t < 32u) {
            var sum = 0.0;
            for (var i = t; i < n; i += 32u) {
                sum = fma(head[i], head[i], sum);
            }
            sums[t] = sum;
        }
        for (var width = 16u; width > 0u; width /= 2u) {
            workgroupBarrier();
            if (t < width) {
                sums[t] += sums[t + width];
            }
        }
        workgroupBarrier();
        let scale = 1.0 / sqrt(sums[0] / f32(n) + p.eps);
        for (var i = t; i < n; i += 128u) {
            if (of_queries) {
                head[i] *= scale * q_norm[p.q_norm_at + i];
            } else {
                head[i] *= scale * k_norm[p.k_norm_at + i];
            }
        }
        workgroupBarrier();
    }
//! end
    if (!of_values) {
        let pairs = p.n_dims / 2u;
        for (var i = t; i < pairs; i += 128u) {
//! if NEOX
            let first = i;
            let second = i + pairs;
//! else
            let first = 2u * i;
            let second = 2u * i + 1u;
//! end
            let angle = angles[p.angles_at + group.y * pairs + i];
            let a = head[first];
            let b = head[second];
            head[first] = fma(a, angle.x, -(b * angle.y));
            head[second] = fma(a, angle.y, b * angle.x);
        }
        workgroupBarrier();
        for (var i = t; i < n; i += 128u) {
            if (of_queries) {
                q[p.q_at + at + i] = head[i];
            } else {
                k[p.k_at + at + i] = head[i];
            }
        }
    }
    if (of_queries) {
        return;
    }
    let offset = select(p.key_offset, p.value_offset, of_values) + number * block_bytes(F16_BITS, n);
    let to = page.y + offset / 4u + row.x % PAGE_POSITIONS * n / 2u;
    for (var i = t; 2u * i < n; i += 128u) {
        let word = to_half(head[2u * i]) | (to_half(head[2u * i + 1u]) << 16u);
//! for s < SLABS
        if (page.x == $su) {
            slab_$s[to + i] = word;
        }
//! end
    }
}
