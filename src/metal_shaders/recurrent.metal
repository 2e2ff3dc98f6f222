// Recurrent layers: convolutions and gated delta rules, each with a state that every token changes.
#include "common.h"

// Tokens whose inputs are kept.
constant constexpr uint N_FEEDS = 64;

// What a pass has of a sequence: rows and pages. The pages are that of the state that it begins with (null: zeros),
// that of the last tokens' inputs, and those that states are written to. The second one's position is that of the first
// row: tokens from the state's position on are replayed up to there. See `src/kv/sequence/recurrent.rs`.
struct Slot {
    uint row;
    uint n_rows;
    uint page;
    uint n_pages;
};

// A page of the recurrent layers, given by its address on the GPU, with its position.
struct State {
    device float* values;
    uint pos;
    uint unused;
};

struct CausalConvArgs {
    uint n_rows;
    uint n_longest;
    uint n_in;
    uint first;
    uint n_channel;
    uint n_tap;
    uint n_bias;
    uint n_out;
    uint part;
    uint gated;
    uint state;
    uint feeds;
    uint n_slots;
    uint n_states;
};

// Rows of a sequence per threadgroup.
constant constexpr uint CONV_ROWS = 32;

// Where the state has what a channel had at one of the `n_tap - 1` tokens before it.
inline uint state_at(constant CausalConvArgs& p, uint channel, uint token) {
    return p.state + (channel / p.part * (p.n_tap - 1) + token) * p.part + channel % p.part;
}

// Value of a channel `n_tap - 1` tokens before position `at`: of a row, of a replayed token, or of the state.
inline float value_before(device const float* x, device const State* pages, constant CausalConvArgs& p,
                          device const Slot& slot, uint channel, uint at) {
    const uint before = p.n_tap - 1, begin = pages[0].pos, pos = pages[1].pos;
    if (at >= pos + before) {
        device const float* from = x + ulong(slot.row + at - before - pos) * p.n_in + p.first + channel;
        return p.gated != 0 ? from[0] * from[-int(2 * p.n_channel)] : from[0];
    }
    if (at >= begin + before) return pages[1].values[p.feeds + (at - before) % N_FEEDS * p.n_channel + channel];
    return pages[0].values == nullptr ? 0.0f : pages[0].values[state_at(p, channel, at - begin)];
}

// `x` are rows of `n_in` values, of which the channels are those from `first` on; so is `out` with rows of `n_out`. A
// thread takes a channel of some rows; that of the first rows alone reads pages, and writes them last.
kernel void causal_conv(device const float* x [[buffer(0)]],
                        device const float* taps [[buffer(1)]],
                        device const float* bias [[buffer(2)]],
                        device const Slot* slots [[buffer(3)]],
                        device const State* states [[buffer(4)]],
                        device float* out [[buffer(5)]],
                        constant CausalConvArgs& p [[buffer(6)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint t [[thread_index_in_threadgroup]]) {
    const uint channel = 64 * group.x + t, first = group.z * CONV_ROWS;
    device const Slot& slot = slots[group.y];
    if (channel >= p.n_channel || first >= slot.n_rows) return;
    device const State* pages = states + slot.page;
    const uint pos = pages[1].pos;
    for (uint row = first; row < min(first + CONV_ROWS, slot.n_rows); row++) {
        float sum = p.n_bias != 0 ? bias[channel] : 0.0f;
        for (uint tap = 0; tap < p.n_tap; tap++) {
            sum += value_before(x, pages, p, slot, channel, pos + row + tap) * taps[tap * p.n_channel + channel];
        }
        const ulong number = slot.row + row;
        const float factor = p.gated != 0 ? x[number * p.n_in + p.first + channel - p.n_channel] : 1.0f;
        out[number * p.n_out + channel] = p.gated != 0 ? sum * factor : times_sigmoid(sum, sum);
    }
    if (first > 0) return;
    for (uint i = 2; i < slot.n_pages; i++) {
        for (uint token = 0; token + 1 < p.n_tap; token++) {
            const float value = value_before(x, pages, p, slot, channel, pages[i].pos + token);
            pages[i].values[state_at(p, channel, token)] = value;
        }
    }
    const uint end = pos + slot.n_rows;
    for (uint at = end - min(slot.n_rows, N_FEEDS); at < end; at++) {
        const float value = value_before(x, pages, p, slot, channel, at + p.n_tap - 1);
        pages[1].values[p.feeds + at % N_FEEDS * p.n_channel + channel] = value;
    }
}

struct KeepFeedsArgs {
    uint n_rows;
    uint n_feed;
    uint feeds;
    uint n_slots;
    uint n_states;
};

// Keeps the inputs of each sequence's last tokens, a thread per value of the rows.
kernel void keep_feeds(device const float* x [[buffer(0)]],
                       device const Slot* slots [[buffer(1)]],
                       device const State* states [[buffer(2)]],
                       constant KeepFeedsArgs& p [[buffer(3)]],
                       uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.n_feed) return;
    device const Slot& slot = slots[at.y];
    device const State& feeds = states[slot.page + 1];
    for (uint row = slot.n_rows - min(slot.n_rows, N_FEEDS); row < slot.n_rows; row++) {
        const float value = x[ulong(slot.row + row) * p.n_feed + at.x];
        feeds.values[p.feeds + (feeds.pos + row) % N_FEEDS * p.n_feed + at.x] = value;
    }
}

struct DeltaFeedArgs {
    uint n_rows;
    uint n_feed;
    uint n_head;
    uint n_head_k;
    uint head_dim_k;
    uint n_rate;
    uint fused;
    float bound;
    float length_eps;
};

// Completes the inputs of a delta rule: a simdgroup per head of queries, then of keys; then a thread per strength, then
// per rate. `beta` and `rate` are `(n_rows, n_head)` and `(n_rows, n_rate)`, or both the same
// `(n_rows, n_head_k, 2, n_head / n_head_k)`.
kernel void delta_feed(device float* x [[buffer(0)]],
                       device const float* beta [[buffer(1)]],
                       device const float* rate [[buffer(2)]],
                       device const float* a [[buffer(3)]],
                       device const float* dt_bias [[buffer(4)]],
                       constant DeltaFeedArgs& p [[buffer(5)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint lane [[thread_index_in_simdgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    const uint number = 4 * group.x + simdgroup;
    device float* row = x + ulong(group.y) * p.n_feed;
    if (number < 2 * p.n_head_k) {
        device float* head = row + number * p.head_dim_k;
        float sum = 0.0f;
        for (uint i = lane; i < p.head_dim_k; i += 32) sum += head[i] * head[i];
        float factor = 1.0f / sqrt(simd_sum(sum) + p.length_eps);
        if (number < p.n_head_k) factor /= sqrt(float(p.head_dim_k));
        for (uint i = lane; i < p.head_dim_k; i += 32) head[i] *= factor;
        return; // whole simdgroups
    }
    const uint i = 32 * (number - 2 * p.n_head_k) + lane, shared_by = p.n_head / p.n_head_k;
    device float* rates = row + p.n_feed - p.n_rate;
    if (i < p.n_head) {
        const uint skipped = p.fused != 0 ? (group.y * p.n_head_k + i / shared_by) * shared_by : 0;
        rates[int(i) - int(p.n_head)] = times_sigmoid(1.0f, beta[group.y * p.n_head + i + skipped]);
    } else if (i < p.n_head + p.n_rate) {
        const uint j = i - p.n_head;
        const uint skipped = p.fused != 0 ? (group.y * p.n_head_k + j / shared_by + 1) * shared_by : 0;
        const float of_head = a[j / (p.n_rate / p.n_head)];
        const float sum = rate[group.y * p.n_rate + j + skipped] + dt_bias[j];
        rates[j] = exp(p.bound != 0.0f ? times_sigmoid(p.bound, of_head * sum) : of_head * softplus(sum));
    }
}

struct TimeStepsArgs {
    uint n_rows;
    uint n_in;
    uint n_feed;
    uint n_head;
};

// Time steps of heads, the last of rows of `n_in` values, which become the last of rows of `n_feed`.
kernel void time_steps(device const float* input [[buffer(0)]],
                       device const float* dt_bias [[buffer(1)]],
                       device float* x [[buffer(2)]],
                       constant TimeStepsArgs& p [[buffer(3)]],
                       uint2 at [[thread_position_in_grid]]) {
    if (at.x >= p.n_head) return;
    const float dt = input[ulong(at.y + 1) * p.n_in - p.n_head + at.x];
    x[ulong(at.y + 1) * p.n_feed - p.n_head + at.x] = softplus(dt + dt_bias[at.x]);
}

struct ScanArgs {
    uint n_rows;
    uint n_feed;
    uint n_head;
    uint n_head_k;
    uint head_dim_k;
    uint head_dim_v;
    uint q;
    uint k;
    uint v;
    uint beta;
    uint rate;
    uint by_channel;
    uint tiled;
    uint columns;
    uint state;
    uint feeds;
    uint n_slots;
    uint n_states;
};

// Columns of a threadgroup. Its 128 threads are 8 for each, which have as many rows of the state each.
constant constexpr uint STATE_COLUMNS = 16;

// A sequence's steps with columns of a head's state `(head_dim_k, head_dim_v)`. Rows beyond `head_dim_k`, of `D`, are
// zeros, and have keys and queries that are. `q`, `k`, `v`, `beta` and `rate` are where these are in rows of `n_feed`
// values. Parts of `columns` columns of the state are stored one after the other. `a` and `d` are for state spaces.
template <bool DELTA, uint D>
inline void scan(device const float* x, device const float* a, device const float* d, device const Slot& slot,
                 device const State* pages, device float* out, constant ScanArgs& p, threadgroup float* keys,
                 threadgroup float* queries, threadgroup float* rates, threadgroup float* predicted,
                 threadgroup float* given, uint block, uint t) {
    constexpr uint ROWS = D / 8;
    const uint blocks = (p.head_dim_v + STATE_COLUMNS - 1) / STATE_COLUMNS, head = block / blocks;
    const uint column = block % blocks * STATE_COLUMNS + t % STATE_COLUMNS, number = head * p.head_dim_v + column;
    const bool exists = column < p.head_dim_v;
    // The head of queries and keys that this one of values shares with others.
    const uint head_k = p.tiled != 0 ? head % p.n_head_k : head / (p.n_head / p.n_head_k);
    const uint first = t / STATE_COLUMNS * ROWS, pos = pages[1].pos;
    const uint at = p.state + number / p.columns * p.columns * p.head_dim_k + number % p.columns;
    const uint n_stored = exists && first < p.head_dim_k ? min(ROWS, p.head_dim_k - first) : 0;
    float state[ROWS] = {};
    if (pages[0].values != nullptr) {
        for (uint i = 0; i < n_stored; i++) state[i] = pages[0].values[at + (first + i) * p.columns];
    }
    uint next = 2;
    for (uint position = pages[0].pos; position < pos + slot.n_rows; position++) {
        device const float* feed = position < pos ? pages[1].values + p.feeds + position % N_FEEDS * p.n_feed
                                                  : x + ulong(slot.row + position - pos) * p.n_feed;
        for (uint i = t; i < D; i += 128) {
            const bool has_row = i < p.head_dim_k;
            keys[i] = has_row ? feed[p.k + head_k * p.head_dim_k + i] : 0.0f;
            queries[i] = has_row ? feed[p.q + head_k * p.head_dim_k + i] : 0.0f;
            const uint rate = p.by_channel != 0 && has_row ? head * p.head_dim_k + i : head;
            rates[i] = DELTA ? feed[p.rate + rate] : exp(feed[p.beta + head] * a[head]);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // State times key: the value that the state predicts.
        float sum = 0.0f;
        for (uint i = 0; i < ROWS; i++) {
            state[i] *= rates[first + i];
            if (DELTA) sum += state[i] * keys[first + i];
        }
        const float value = exists ? feed[p.v + number] : 0.0f;
        float error = value;
        if (DELTA) {
            predicted[t] = sum;
            threadgroup_barrier(mem_flags::mem_threadgroup);
            float prediction = 0.0f;
            for (uint i = t % STATE_COLUMNS; i < 128; i += STATE_COLUMNS) prediction += predicted[i];
            error = exists ? value - prediction : 0.0f;
        }
        error *= feed[p.beta + head];
        sum = 0.0f;
        for (uint i = 0; i < ROWS; i++) {
            state[i] += keys[first + i] * error;
            sum += state[i] * queries[first + i];
        }
        given[t] = sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (t < STATE_COLUMNS && exists && position >= pos) {
            float total = DELTA ? 0.0f : d[head] * value;
            for (uint i = t; i < 128; i += STATE_COLUMNS) total += given[i];
            out[ulong(slot.row + position - pos) * p.n_head * p.head_dim_v + number] = total;
        }
        if (pages[next].pos == position + 1) {
            for (uint i = 0; i < n_stored; i++) pages[next].values[at + (first + i) * p.columns] = state[i];
            next = min(next + 1, slot.n_pages - 1);
        }
    }
}

// Gated delta rule.
template <uint D>
kernel void delta_rule(device const float* x [[buffer(0)]],
                       device const Slot* slots [[buffer(1)]],
                       device const State* states [[buffer(2)]],
                       device float* out [[buffer(3)]],
                       constant ScanArgs& p [[buffer(4)]],
                       uint2 group [[threadgroup_position_in_grid]],
                       uint t [[thread_index_in_threadgroup]]) {
    threadgroup float keys[D];
    threadgroup float queries[D];
    threadgroup float rates[D];
    threadgroup float predicted[128];
    threadgroup float given[128];
    static_assert((3 * D + 2 * 128) * sizeof(float) <= THREADGROUP_MEMORY, "threadgroup memory");
    device const Slot& slot = slots[group.y];
    device const State* pages = states + slot.page;
    scan<true, D>(x, nullptr, nullptr, slot, pages, out, p, keys, queries, rates, predicted, given, group.x, t);
}

// State space of Mamba 2, whose strengths are time steps: each, times the head's `a`, is a rate's logarithm.
template <uint D>
kernel void ssm_scan(device const float* x [[buffer(0)]],
                     device const float* a [[buffer(1)]],
                     device const float* d [[buffer(2)]],
                     device const Slot* slots [[buffer(3)]],
                     device const State* states [[buffer(4)]],
                     device float* out [[buffer(5)]],
                     constant ScanArgs& p [[buffer(6)]],
                     uint2 group [[threadgroup_position_in_grid]],
                     uint t [[thread_index_in_threadgroup]]) {
    threadgroup float keys[D];
    threadgroup float queries[D];
    threadgroup float rates[D];
    threadgroup float predicted[128];
    threadgroup float given[128];
    static_assert((3 * D + 2 * 128) * sizeof(float) <= THREADGROUP_MEMORY, "threadgroup memory");
    device const Slot& slot = slots[group.y];
    device const State* pages = states + slot.page;
    scan<false, D>(x, a, d, slot, pages, out, p, keys, queries, rates, predicted, given, group.x, t);
}

INSTANTIATE("delta_rule_128", delta_rule, 128)
INSTANTIATE("delta_rule_256", delta_rule, 256)
INSTANTIATE("ssm_scan_128", ssm_scan, 128)
INSTANTIATE("ssm_scan_256", ssm_scan, 256)

struct ChannelScanArgs {
    uint n_rows;
    uint n_channel;
    uint n_state;
    uint n_block;
    uint state;
    uint feeds;
    uint n_slots;
    uint n_states;
};

constant constexpr uint CHANNEL_STATES = 64;

// State space of Mamba 1, a thread per channel of a sequence. States, and `a`, lie transposed for each `n_block`
// channels.
kernel void channel_scan(device const float* x [[buffer(0)]],
                         device const float* a [[buffer(1)]],
                         device const float* d [[buffer(2)]],
                         device const Slot* slots [[buffer(3)]],
                         device const State* states [[buffer(4)]],
                         device float* out [[buffer(5)]],
                         constant ChannelScanArgs& p [[buffer(6)]],
                         uint2 group [[threadgroup_position_in_grid]],
                         uint t [[thread_index_in_threadgroup]]) {
    const uint channel = 64 * group.x + t, n_feed = 2 * (p.n_channel + p.n_state);
    if (channel >= p.n_channel) return;
    device const Slot& slot = slots[group.y];
    device const State* pages = states + slot.page;
    const uint pos = pages[1].pos;
    // Where a channel's first value is, among states and rates.
    const uint first = channel / p.n_block * p.n_block * p.n_state + channel % p.n_block;
    float state[CHANNEL_STATES];
    for (uint i = 0; i < p.n_state; i++) {
        state[i] = pages[0].values == nullptr ? 0.0f : pages[0].values[p.state + first + i * p.n_block];
    }
    uint next = 2;
    for (uint position = pages[0].pos; position < pos + slot.n_rows; position++) {
        device const float* feed = position < pos ? pages[1].values + p.feeds + position % N_FEEDS * n_feed
                                                  : x + ulong(slot.row + position - pos) * n_feed;
        device const float* b = feed + 2 * p.n_channel;
        device const float* c = b + p.n_state;
        const float value = feed[channel], step = feed[p.n_channel + channel];
        float sum = d[channel] * value;
        for (uint i = 0; i < p.n_state; i++) {
            state[i] = exp(step * a[first + i * p.n_block]) * state[i] + step * value * b[i];
            sum += state[i] * c[i];
        }
        if (position >= pos) out[ulong(slot.row + position - pos) * p.n_channel + channel] = sum;
        if (pages[next].pos == position + 1) {
            for (uint i = 0; i < p.n_state; i++) pages[next].values[p.state + first + i * p.n_block] = state[i];
            next = min(next + 1, slot.n_pages - 1);
        }
    }
}

struct GatedGroupsArgs {
    uint n;
    uint n_rows;
    uint n_group;
    uint n_in;
    uint n_norm;
    float eps;
};

// Multiplies groups of `n` values by `silu` of their gates, the first of rows of `n_in`, and then, if there are
// weights, takes their RMS norm, in place; a threadgroup per group of a row.
kernel void gated_groups(device float* x [[buffer(0)]],
                         device const float* gate [[buffer(1)]],
                         device const float* w [[buffer(2)]],
                         constant GatedGroupsArgs& p [[buffer(3)]],
                         uint2 at [[threadgroup_position_in_grid]],
                         uint t [[thread_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup float sums[8];
    device float* values = x + (ulong(at.y) * p.n_group + at.x) * p.n;
    device const float* gates = gate + ulong(at.y) * p.n_in + at.x * p.n;
    float sum = 0.0f;
    for (uint i = t; i < p.n; i += 256) {
        values[i] *= times_sigmoid(gates[i], gates[i]);
        sum += values[i] * values[i];
    }
    if (p.n_norm == 0) return; // all threads alike
    const float scale = 1.0f / sqrt(threadgroup_sum(sum, sums, lane, simdgroup) / float(p.n) + p.eps);
    for (uint i = t; i < p.n; i += 256) values[i] *= scale * w[at.x * p.n + i];
}

struct GatedNormArgs {
    uint n;
    uint n_rows;
    float eps;
    uint sigmoid;
};

// RMS norms of single heads, in place, each value then multiplied by `silu` of its gate, or by the sigmoid of it; one
// simdgroup per head.
kernel void gated_norm_heads(device float* x [[buffer(0)]],
                             device const float* gate [[buffer(1)]],
                             device const float* w [[buffer(2)]],
                             constant GatedNormArgs& p [[buffer(3)]],
                             uint group [[threadgroup_position_in_grid]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    const uint row = group * 4 + simdgroup;
    if (row >= p.n_rows) return; // whole simdgroups
    device float* head = x + ulong(row) * p.n;
    device const float* strength = gate + ulong(row) * p.n;
    float sum = 0.0f;
    for (uint i = lane; i < p.n; i += 32) sum += head[i] * head[i];
    const float scale = 1.0f / sqrt(simd_sum(sum) / float(p.n) + p.eps);
    for (uint i = lane; i < p.n; i += 32) {
        const float value = head[i] * scale * w[i];
        const float by_silu = times_sigmoid(strength[i], strength[i]) * value;
        head[i] = p.sigmoid != 0 ? times_sigmoid(value, strength[i]) : by_silu;
    }
}
