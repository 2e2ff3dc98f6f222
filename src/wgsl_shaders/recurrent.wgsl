// Recurrent layers. A slot is what a pass has of a sequence: its first row, rows, first page, pages. The pages are that
// of the state that it begins with (without address: zeros), that of the last tokens' inputs, and those that states are
// written to; a page is slab, word and position. The second one's position is that of the first row: tokens from the
// state's position on are replayed up to there. See `src/kv/sequence/recurrent.rs`.

//! kernel-group causal_conv keep_feeds delta_rule ssm_scan channel_scan
//! use pages slabs

// Tokens whose inputs are kept.
const N_FEEDS: u32 = 64u;

fn page_value(page: vec4<u32>, at: u32) -> f32 {
    return bitcast<f32>(page_word(page.x, page.y + at));
}

fn store_value(page: vec4<u32>, at: u32, value: f32) {
//! for s < SLABS
    if (page.x == $su) {
        slab_$s[page.y + at] = bitcast<u32>(value);
    }
//! end
}

//! kernel causal_conv
// Rows of a sequence per workgroup.
const CONV_ROWS: u32 = 32u;

// Value of a channel `n_tap - 1` tokens before position `at`: of a row, of a replayed token, or of the state.
fn value_before(slot: vec4<u32>, channel: u32, at: u32) -> f32 {
    let before = p.n_tap - 1u;
    let begin = states[p.states_at + slot.z];
    let feeds = states[p.states_at + slot.z + 1u];
    if (at >= feeds.z + before) {
        let i = p.x_at + (slot.x + at - before - feeds.z) * p.n_in + p.first + channel;
        if (p.gated != 0u) {
            return x[i] * x[i - 2u * p.n_channel];
        }
        return x[i];
    }
    if (at >= begin.z + before) {
        return page_value(feeds, p.feeds + (at - before) % N_FEEDS * p.n_channel + channel);
    }
    if (begin.y == 0u) {
        return 0.0;
    }
    return page_value(begin, state_at(channel, at - begin.z));
}

// Where the state has what a channel had at one of the `n_tap - 1` tokens before it.
fn state_at(channel: u32, token: u32) -> u32 {
    return p.state + (channel / p.part * (p.n_tap - 1u) + token) * p.part + channel % p.part;
}

// A thread per channel of some rows. The thread of the first rows alone reads pages, and writes them last.
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let channel = group.x * 64u + t;
    let slot = slots[p.slots_at + group.y];
    let first = group.z * CONV_ROWS;
    if (channel >= p.n_channel || first >= slot.y) {
        return;
    }
    let feeds = states[p.states_at + slot.z + 1u];
    for (var row = first; row < min(first + CONV_ROWS, slot.y); row++) {
        var sum = 0.0;
        if (p.n_bias != 0u) {
            sum = bias[p.bias_at + channel];
        }
        for (var tap = 0u; tap < p.n_tap; tap++) {
            let weight = taps[p.taps_at + tap * p.n_channel + channel];
            sum = fma(value_before(slot, channel, feeds.z + row + tap), weight, sum);
        }
        if (p.gated != 0u) {
            sum *= x[p.x_at + (slot.x + row) * p.n_in + p.first + channel - p.n_channel];
        } else {
            sum = times_sigmoid(sum, sum);
        }
        out[p.out_at + (slot.x + row) * p.n_out + channel] = sum;
    }
    if (first > 0u) {
        return;
    }
    for (var i = 2u; i < slot.w; i++) {
        let to = states[p.states_at + slot.z + i];
        for (var token = 0u; token + 1u < p.n_tap; token++) {
            store_value(to, state_at(channel, token), value_before(slot, channel, to.z + token));
        }
    }
    let end = feeds.z + slot.y;
    for (var at = end - min(slot.y, N_FEEDS); at < end; at++) {
        let value = value_before(slot, channel, at + p.n_tap - 1u);
        store_value(feeds, p.feeds + at % N_FEEDS * p.n_channel + channel, value);
    }
}

//! kernel keep_feeds
// A thread per value of the rows.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let i = group.x * 256u + t;
    if (i >= p.n_feed) {
        return;
    }
    let slot = slots[p.slots_at + group.y];
    let feeds = states[p.states_at + slot.z + 1u];
    for (var row = slot.y - min(slot.y, N_FEEDS); row < slot.y; row++) {
        let value = x[p.x_at + (slot.x + row) * p.n_feed + i];
        store_value(feeds, p.feeds + (feeds.z + row) % N_FEEDS * p.n_feed + i, value);
    }
}

//! kernel delta_feed
var<workgroup> sums: array<f32, 128>;

// A team of 32 threads per head of queries, then of keys; then a thread per strength, then per rate.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let lane = t % 32u;
    let number = 4u * group.x + t / 32u;
    let is_head = number < 2u * p.n_head_k;
    let row = p.x_at + group.y * p.n_feed;
    let at = row + number * p.head_dim_k;
    var sum = 0.0;
    if (is_head) {
        for (var i = lane; i < p.head_dim_k; i += 32u) {
            sum = fma(x[at + i], x[at + i], sum);
        }
    }
    sums[t] = sum;
    for (var width = 16u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (lane < width) {
            sums[t] += sums[t + width];
        }
    }
    workgroupBarrier();
    if (is_head) {
        var factor = 1.0 / sqrt(sums[t - lane] + p.length_eps);
        if (number < p.n_head_k) {
            factor /= sqrt(f32(p.head_dim_k));
        }
        for (var i = lane; i < p.head_dim_k; i += 32u) {
            x[at + i] *= factor;
        }
        return;
    }
    let i = 32u * (number - 2u * p.n_head_k) + lane;
    let rates = row + p.n_feed - p.n_rate;
    let shared_by = p.n_head / p.n_head_k;
    if (i < p.n_head) {
        var source = group.y * p.n_head + i;
        if (p.fused != 0u) {
            source += (group.y * p.n_head_k + i / shared_by) * shared_by;
        }
        x[rates - p.n_head + i] = times_sigmoid(1.0, beta[p.beta_at + source]);
    } else if (i < p.n_head + p.n_rate) {
        let number_of_rate = i - p.n_head;
        var source = group.y * p.n_rate + number_of_rate;
        if (p.fused != 0u) {
            source += (group.y * p.n_head_k + number_of_rate / shared_by + 1u) * shared_by;
        }
        let of_head = a[p.a_at + number_of_rate / (p.n_rate / p.n_head)];
        let sum_of_rate = rate[p.rate_at + source] + dt_bias[p.dt_bias_at + number_of_rate];
        var logarithm = of_head * softplus(sum_of_rate);
        if (p.bound != 0.0) {
            logarithm = times_sigmoid(p.bound, of_head * sum_of_rate);
        }
        x[rates + number_of_rate] = exp_negative(logarithm);
    }
}

//! kernel time_steps
// A thread per head of a row.
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let head = group.x * 64u + t;
    if (head < p.n_head) {
        let dt = input[p.input_at + (group.y + 1u) * p.n_in - p.n_head + head];
        x[p.x_at + (group.y + 1u) * p.n_feed - p.n_head + head] = softplus(dt + dt_bias[p.dt_bias_at + head]);
    }
}

//! kernel-group delta_rule ssm_scan
// Columns of a workgroup. Its 128 threads are 8 for each, which have as many rows of the state each.
const COLUMNS: u32 = 16u;

// A token's key, query and rates, by row of the state; sums of the threads.
var<workgroup> keys: array<f32, $D>;
var<workgroup> queries: array<f32, $D>;
var<workgroup> rates: array<f32, $D>;
var<workgroup> predicted: array<f32, 128>;
var<workgroup> given: array<f32, 128>;

fn added(four: vec4<f32>) -> f32 {
    return (four.x + four.y) + (four.z + four.w);
}

// Value `i` of what a token at `position` feeds, of a row or replayed.
fn feed_at(slot: vec4<u32>, feeds: vec4<u32>, position: u32, i: u32) -> f32 {
    if (position < feeds.z) {
        return page_value(feeds, p.feeds + position % N_FEEDS * p.n_feed + i);
    }
    return x[p.x_at + (slot.x + position - feeds.z) * p.n_feed + i];
}

// Four rows of a column, whose first one is at `at`.
fn loaded(page: vec4<u32>, at: u32, row: u32, exists: bool) -> vec4<f32> {
    var values = vec4<f32>();
    if (exists && page.y != 0u) {
        for (var i = 0u; i < 4u && row + i < p.head_dim_k; i++) {
            values[i] = page_value(page, at + (row + i) * p.columns);
        }
    }
    return values;
}

fn store(page: vec4<u32>, at: u32, row: u32, values: vec4<f32>) {
    for (var i = 0u; i < 4u && row + i < p.head_dim_k; i++) {
        store_value(page, at + (row + i) * p.columns, values[i]);
    }
}

fn four_of_keys(row: u32) -> vec4<f32> {
    return vec4<f32>(keys[row], keys[row + 1u], keys[row + 2u], keys[row + 3u]);
}

fn four_of_queries(row: u32) -> vec4<f32> {
    return vec4<f32>(queries[row], queries[row + 1u], queries[row + 2u], queries[row + 3u]);
}

fn four_of_rates(row: u32) -> vec4<f32> {
    return vec4<f32>(rates[row], rates[row + 1u], rates[row + 2u], rates[row + 3u]);
}

// Rows beyond `head_dim_k` are zeros, and have keys and queries that are.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let blocks = (p.head_dim_v + COLUMNS - 1u) / COLUMNS;
    let head = group.x / blocks;
    let column = group.x % blocks * COLUMNS + t % COLUMNS;
    let exists = column < p.head_dim_v;
    // The head of queries and keys that this one of values shares with others.
    let head_k = select(head / (p.n_head / p.n_head_k), head % p.n_head_k, p.tiled != 0u);
    let first = t / COLUMNS * ($Du / 8u);
    let slot = slots[p.slots_at + group.y];
    let begin = states[p.states_at + slot.z];
    let feeds = states[p.states_at + slot.z + 1u];
    let number = head * p.head_dim_v + column;
    let at = p.state + number / p.columns * p.columns * p.head_dim_k + number % p.columns;
//! for k < STATE_VECTORS
    let row_$k = first + 4u * $ku;
    var state_$k = loaded(begin, at, row_$k, exists);
//! end
    var next = 2u;
    for (var position = begin.z; position < feeds.z + slot.y; position++) {
        for (var i = t; i < $Du; i += 128u) {
            var key = 0.0;
            var query = 0.0;
            var kept = 0.0;
            if (i < p.head_dim_k) {
                key = feed_at(slot, feeds, position, p.k + head_k * p.head_dim_k + i);
                query = feed_at(slot, feeds, position, p.q + head_k * p.head_dim_k + i);
//! if DELTA
                let number_of_rate = select(head, head * p.head_dim_k + i, p.by_channel != 0u);
                kept = feed_at(slot, feeds, position, p.rate + number_of_rate);
//! else
                kept = exp_negative(feed_at(slot, feeds, position, p.beta + head) * a[p.a_at + head]);
//! end
            }
            keys[i] = key;
            queries[i] = query;
            rates[i] = kept;
        }
        workgroupBarrier();
//! if DELTA
        // State times key: the value that the state predicts.
        var predicted_sum = vec4<f32>();
//! for k < STATE_VECTORS
        state_$k *= four_of_rates(row_$k);
        predicted_sum = fma(state_$k, four_of_keys(row_$k), predicted_sum);
//! end
        predicted[t] = added(predicted_sum);
        workgroupBarrier();
//! else
//! for k < STATE_VECTORS
        state_$k *= four_of_rates(row_$k);
//! end
//! end
        var error = 0.0;
        if (exists) {
            error = feed_at(slot, feeds, position, p.v + number);
//! if DELTA
            var prediction = 0.0;
            for (var i = t % COLUMNS; i < 128u; i += COLUMNS) {
                prediction += predicted[i];
            }
            error -= prediction;
//! end
            error *= feed_at(slot, feeds, position, p.beta + head);
        }
        var sum = vec4<f32>();
//! for k < STATE_VECTORS
        state_$k = fma(four_of_keys(row_$k), vec4<f32>(error), state_$k);
        sum = fma(state_$k, four_of_queries(row_$k), sum);
//! end
        given[t] = added(sum);
        workgroupBarrier();
        if (t < COLUMNS && exists && position >= feeds.z) {
            var total = 0.0;
            for (var i = t; i < 128u; i += COLUMNS) {
                total += given[i];
            }
//! if DELTA
//! else
            total = fma(d[p.d_at + head], feed_at(slot, feeds, position, p.v + number), total);
//! end
            out[p.out_at + (slot.x + position - feeds.z) * p.n_head * p.head_dim_v + number] = total;
        }
        let to = states[p.states_at + slot.z + next];
        if (to.z == position + 1u) {
            if (exists) {
//! for k < STATE_VECTORS
                store(to, at, row_$k, state_$k);
//! end
            }
            next = min(next + 1u, slot.w - 1u);
        }
    }
}

//! kernel channel_scan
const CHANNEL_STATES: u32 = 64u;

// Value `i` of what a token at `position` feeds, of a row or replayed.
fn fed(slot: vec4<u32>, feeds: vec4<u32>, position: u32, i: u32) -> f32 {
    let n_feed = 2u * (p.n_channel + p.n_state);
    if (position < feeds.z) {
        return page_value(feeds, p.feeds + position % N_FEEDS * n_feed + i);
    }
    return x[p.x_at + (slot.x + position - feeds.z) * n_feed + i];
}

// A thread per channel of a sequence.
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let channel = group.x * 64u + t;
    if (channel >= p.n_channel) {
        return;
    }
    let slot = slots[p.slots_at + group.y];
    let begin = states[p.states_at + slot.z];
    let feeds = states[p.states_at + slot.z + 1u];
    // Where a channel's first value is, among states and rates.
    let first = channel / p.n_block * p.n_block * p.n_state + channel % p.n_block;
    var state: array<f32, CHANNEL_STATES>;
    for (var i = 0u; i < p.n_state; i++) {
        state[i] = 0.0;
        if (begin.y != 0u) {
            state[i] = page_value(begin, p.state + first + i * p.n_block);
        }
    }
    var next = 2u;
    for (var position = begin.z; position < feeds.z + slot.y; position++) {
        let value = fed(slot, feeds, position, channel);
        let step = fed(slot, feeds, position, p.n_channel + channel);
        var sum = 0.0;
        for (var i = 0u; i < p.n_state; i++) {
            let kept = exp_negative(step * a[p.a_at + first + i * p.n_block]);
            let given = step * value * fed(slot, feeds, position, 2u * p.n_channel + i);
            state[i] = fma(kept, state[i], given);
            sum = fma(state[i], fed(slot, feeds, position, 2u * p.n_channel + p.n_state + i), sum);
        }
        if (position >= feeds.z) {
            let row = slot.x + position - feeds.z;
            out[p.out_at + row * p.n_channel + channel] = fma(d[p.d_at + channel], value, sum);
        }
        let to = states[p.states_at + slot.z + next];
        if (to.z == position + 1u) {
            for (var i = 0u; i < p.n_state; i++) {
                store_value(to, p.state + first + i * p.n_block, state[i]);
            }
            next = min(next + 1u, slot.w - 1u);
        }
    }
}

//! kernel gated_groups
var<workgroup> sums: array<f32, 256>;

// A workgroup per group of a row.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let at = p.x_at + (group.y * p.n_group + group.x) * p.n;
    let gates = p.gate_at + group.y * p.n_in + group.x * p.n;
    var sum = 0.0;
    for (var i = t; i < p.n; i += 256u) {
        let strength = gate[gates + i];
        let value = times_sigmoid(strength, strength) * x[at + i];
        x[at + i] = value;
        sum = fma(value, value, sum);
    }
    if (p.n_norm == 0u) {
        return;
    }
    sums[t] = sum;
    for (var width = 128u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (t < width) {
            sums[t] += sums[t + width];
        }
    }
    workgroupBarrier();
    let scale = 1.0 / sqrt(sums[0] / f32(p.n) + p.eps);
    for (var i = t; i < p.n; i += 256u) {
        x[at + i] *= scale * w[p.w_at + group.x * p.n + i];
    }
}

//! kernel gated_norm_heads
var<workgroup> sums: array<f32, 128>;

// A team of 32 threads per head.
@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) t: u32) {
    let row = folded(group) * 4u + t / 32u;
    let lane = t % 32u;
    let at = row * p.n;
    var sum = 0.0;
    if (row < p.n_rows) {
        for (var i = lane; i < p.n; i += 32u) {
            let value = x[p.x_at + at + i];
            sum = fma(value, value, sum);
        }
    }
    sums[t] = sum;
    for (var width = 16u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if (lane < width) {
            sums[t] += sums[t + width];
        }
    }
    workgroupBarrier();
    if (row < p.n_rows) {
        let scale = 1.0 / sqrt(sums[t - lane] / f32(p.n) + p.eps);
        for (var i = lane; i < p.n; i += 32u) {
            let value = x[p.x_at + at + i] * scale * w[p.w_at + i];
            let strength = gate[p.gate_at + at + i];
            if (p.sigmoid != 0u) {
                x[p.x_at + at + i] = times_sigmoid(value, strength);
            } else {
                x[p.x_at + at + i] = times_sigmoid(strength, strength) * value;
            }
        }
    }
}
