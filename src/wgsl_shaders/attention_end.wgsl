    // What a workgroup has found: `vectors`, sums of weighted values of its heads, and in the threads of a head `largest` and
    // `total`. Behind this ends the function.
    workgroupBarrier();
//! if SINGLE
    if (t % team == 0u) {
        ends[my_head] = vec2<f32>(largest, total);
    }
    workgroupBarrier();
    for (var i = t; i < heads * p.head_dim_v; i += 128u) {
        let g = i / p.head_dim_v;
        let c = i % p.head_dim_v;
        let sink = sinks[p.sinks_at + kv_head * n_group + chunk * $Gu + g];
        let all_largest = max(sink, ends[g].x);
        let weight = exp_negative(ends[g].x - all_largest);
        let all = fma(weight, ends[g].y, exp_negative(sink - all_largest));
        out[p.out_at + (first + g) * p.head_dim_v + c] = weighted(fma(weight, vectors[g * ($Du / 4u) + c / 4u][c % 4u], 0.0), all);
    }
}
//! else
    for (var i = t; i < heads * p.head_dim_v; i += 128u) {
        let g = i / p.head_dim_v;
        let c = i % p.head_dim_v;
        let to = ((first + g) * p.n_splits + group.x) * (p.head_dim_v + 2u) + c;
        partial[p.partial_at + to] = vectors[g * ($Du / 4u) + c / 4u][c % 4u];
    }
    if (t % team == 0u && my_head < heads) {
        let to = ((first + my_head) * p.n_splits + group.x) * (p.head_dim_v + 2u) + p.head_dim_v;
        partial[p.partial_at + to] = largest;
        partial[p.partial_at + to + 1u] = total;
    }
}
//! end
