// Definitions shared by all kernels. The library is compiled without fast math, so that sums keep the order written
// here.
#pragma once
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

// Compiles `function<...>` as a kernel with the name `name` for the host.
#define INSTANTIATE(name, function, ...) \
    template [[host_name(name)]] [[kernel]] decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;

// Threadgroup memory that every Apple GPU has, in bytes.
constant constexpr uint THREADGROUP_MEMORY = 32768;

// Used as minus infinity: finite, and `exp(MASKED - x)` is 0 for every score x.
constant constexpr float MASKED = -1e30f;

// `x / (1 + exp(-t))`, with an exponential that cannot overflow.
inline float times_sigmoid(float x, float t) {
    const float e = exp(-fabs(t));
    return t < 0.0f ? x * e / (1.0f + e) : x / (1.0f + e);
}

// `ln(1 + e^x)`; the logarithm is a series of `e / (2 + e)`, which is at most 1/3.
inline float softplus(float x) {
    const float e = exp(-fabs(x)), s = e / (2.0f + e), square = s * s;
    float sum = 0.0769230769f + square * 0.0666666667f;
    sum = 0.0909090909f + square * sum;
    sum = 0.111111111f + square * sum;
    sum = 0.142857143f + square * sum;
    sum = 0.2f + square * sum;
    sum = 0.333333333f + square * sum;
    sum = 1.0f + square * sum;
    return max(x, 0.0f) + 2.0f * s * sum;
}

// `cap * tanh(x / cap)`; x if cap is 0.
inline float softcapped(float x, float cap) {
    return cap > 0.0f ? cap * precise::tanh(x / cap) : x;
}

// Sum of `x` over a threadgroup of 8 simdgroups, the same in all threads. `sums` has room for 8.
inline float threadgroup_sum(float x, threadgroup float* sums, uint lane, uint simdgroup) {
    x = simd_sum(x);
    threadgroup_barrier(mem_flags::mem_threadgroup); // `sums` may still be read from the call before
    if (lane == 0) sums[simdgroup] = x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0.0f;
    for (uint i = 0; i < 8; i++) sum += sums[i];
    return sum;
}
