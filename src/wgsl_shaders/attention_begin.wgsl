    // The part of a workgroup: a row, a split of its keys, heads of the queries.
    let row = rows[p.rows_at + group.z];
    let pos = row.x;
    let seen = first_seen(pos);
    let split = seen / SPLIT + group.x;
    let start = max(seen, split * SPLIT);
    let stop = min(pos + 1u, (split + 1u) * SPLIT);
    if (start >= stop) {
        return; // all threads alike
    }
    let n_group = p.n_head / p.n_head_kv;
    let chunks = (n_group + $Gu - 1u) / $Gu;
    let kv_head = group.y / chunks;
    let chunk = group.y % chunks;
    let heads = min($Gu, n_group - chunk * $Gu);
    let first = group.z * p.n_head + kv_head * n_group + chunk * $Gu;

    for (var i = t; i < heads * p.head_dim / 4u; i += 128u) {
        let g = i / (p.head_dim / 4u);
        let c = i % (p.head_dim / 4u);
        let at = p.q_at + (first + g) * p.head_dim + 4u * c;
        vectors[g * ($Du / 4u) + c] = p.scale * vec4<f32>(q[at], q[at + 1u], q[at + 2u], q[at + 3u]);
    }

    // Head of a thread in the softmax, with the same numbers in all of its threads.
    let team = 128u / $Gu;
    let my_head = t / team;
    let slope = slope_of(kv_head * n_group + chunk * $Gu + my_head);
    var largest = MASKED;
    var total = 0.0;
