// The part of the Metal Shading Language that our shaders use, for clang++ on a CPU.
//
// Two compilations: MSL_TYPES checks types only, with the address spaces that a Metal compiler insists on; otherwise
// all memory is one, and what needs other lanes calls the runtime.
#pragma once
#pragma clang system_header

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

#define INLINE __attribute__((always_inline)) inline
#define kernel
#define thread
#ifdef MSL_TYPES
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif

#define INFINITY __builtin_inff()
#define FLT_MAX __FLT_MAX__

// Vectors are clang's, whose swizzles and operators are those of MSL. `float4(...)` is a macro, `float4` a type.
#define VECTORS(T)                                                                                 \
    typedef T T##2 __attribute__((ext_vector_type(2)));                                            \
    typedef T T##3 __attribute__((ext_vector_type(3)));                                            \
    typedef T T##4 __attribute__((ext_vector_type(4)));                                            \
    typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T))));               \
    typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort) VECTORS(int) VECTORS(uint) VECTORS(ulong) VECTORS(half) VECTORS(float)

namespace msl {
template <class T> struct Shape { typedef T element; static constexpr int n = 1; };
template <class T, int N> struct Shape<T __attribute__((ext_vector_type(N)))> { typedef T element; static constexpr int n = N; };

template <int N, class V, class A> INLINE void put(V& v, A a) {
    typedef typename Shape<V>::element E;
    static_assert(N + Shape<A>::n <= Shape<V>::n, "too many components");
    if constexpr (Shape<A>::n == 1) v[N] = (E)a;
    else {
#pragma unroll
        for (int i = 0; i < Shape<A>::n; i++) v[N + i] = (E)a[i];
    }
}
template <int N, class V, class A, class... R> INLINE void put_all(V& v, A a, R... rest) {
    put<N>(v, a);
    if constexpr (sizeof...(R) > 0) put_all<N + Shape<A>::n>(v, rest...);
    else static_assert(N + Shape<A>::n == Shape<V>::n, "too few components");
}
// `V(arguments)`: one scalar for all components, or as many as there are, or a conversion.
template <class V, class... A> INLINE V make(A... a) {
    if constexpr (sizeof...(A) == 1 && ((Shape<A>::n == 1) && ...)) return (V)(typename Shape<V>::element)(a + ...);
    else {
        V v;
        put_all<0>(v, a...);
        return v;
    }
}
} // namespace msl
#define char4(...) msl::make<char4>(__VA_ARGS__)
#define uchar4(...) msl::make<uchar4>(__VA_ARGS__)
#define ushort4(...) msl::make<ushort4>(__VA_ARGS__)
#define uint2(...) msl::make<uint2>(__VA_ARGS__)
#define uint3(...) msl::make<uint3>(__VA_ARGS__)
#define uint4(...) msl::make<uint4>(__VA_ARGS__)
#define ulong2(...) msl::make<ulong2>(__VA_ARGS__)
#define half4(...) msl::make<half4>(__VA_ARGS__)
#define float2(...) msl::make<float2>(__VA_ARGS__)
#define float4(...) msl::make<float4>(__VA_ARGS__)

// The runtime. `line` is the caller's.
extern "C" {
void msl_barrier(uint flags, uint line);
void msl_simdgroup_barrier(uint flags, uint line);
float msl_reduce_float(uint operation, float value, uint line);
uint msl_reduce_uint(uint operation, uint value, uint line);
float msl_shuffle_xor(float value, uint mask, uint line);
uint msl_prefix_sum(uint value, uint line);
void msl_matrix_multiply(float* d, const float* a, const float* b, const float* c, uint line);
void msl_matrix_access(uint line);
uint msl_lane();
void* msl_shared(void* memory, ulong bytes, const char* name);
}

namespace metal {
template <class T, class U> INLINE T as_type(U value) {
    static_assert(sizeof(T) == sizeof(U), "as_type: sizes differ");
    return __builtin_bit_cast(T, value);
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
INLINE void threadgroup_barrier(mem_flags flags, uint line = __builtin_LINE()) { msl_barrier((uint)flags, line); }
INLINE void simdgroup_barrier(mem_flags flags, uint line = __builtin_LINE()) { msl_simdgroup_barrier((uint)flags, line); }

INLINE float exp(float x) { return __builtin_expf(x); }
INLINE float exp2(float x) { return __builtin_exp2f(x); }
INLINE float log(float x) { return __builtin_logf(x); }
INLINE uint clz(uint x) { return x == 0 ? 32 : __builtin_clz(x); }
INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
INLINE float fabs(float x) { return __builtin_fabsf(x); }
namespace precise { INLINE float tanh(float x) { return __builtin_tanhf(x); } }
// Overloads as in MSL: arguments of two types are ambiguous.
INLINE float max(float a, float b) { return __builtin_fmaxf(a, b); }
INLINE float min(float a, float b) { return __builtin_fminf(a, b); }
INLINE uint max(uint a, uint b) { return a < b ? b : a; }
INLINE uint min(uint a, uint b) { return b < a ? b : a; }
INLINE int max(int a, int b) { return a < b ? b : a; }
INLINE int min(int a, int b) { return b < a ? b : a; }
INLINE float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

// Columns of four.
struct float4x4 {
    float4 columns[4];
    INLINE explicit float4x4(float diagonal) {
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) columns[i][j] = i == j ? diagonal : 0.0f;
    }
    INLINE float4x4(float4 a, float4 b, float4 c, float4 d) : columns{a, b, c, d} {}
    INLINE float4x4() {}
    INLINE float4& operator[](uint i) { return columns[i]; }
    INLINE const float4& operator[](uint i) const { return columns[i]; }
};

// Collectives of a simdgroup: 0 sum, 1 largest, 2 smallest.
INLINE float simd_sum(float x, uint line = __builtin_LINE()) { return msl_reduce_float(0, x, line); }
INLINE float simd_max(float x, uint line = __builtin_LINE()) { return msl_reduce_float(1, x, line); }
INLINE uint simd_max(uint x, uint line = __builtin_LINE()) { return msl_reduce_uint(1, x, line); }
INLINE uint simd_sum(uint x, uint line = __builtin_LINE()) { return msl_reduce_uint(0, x, line); }
INLINE uint simd_min(uint x, uint line = __builtin_LINE()) { return msl_reduce_uint(2, x, line); }
INLINE float simd_shuffle_xor(float x, ushort mask, uint line = __builtin_LINE()) { return msl_shuffle_xor(x, mask, line); }
INLINE uint simd_shuffle_xor(uint x, ushort mask, uint line = __builtin_LINE()) {
    return as_type<uint>(msl_shuffle_xor(as_type<float>(x), mask, line));
}
INLINE uint simd_prefix_exclusive_sum(uint x, uint line = __builtin_LINE()) { return msl_prefix_sum(x, line); }

// Where operations are counted these stay calls: what they compute here is not what a GPU computes.
#ifdef MSL_COUNTED
#define MATRIX_INLINE __attribute__((noinline)) inline
#else
#define MATRIX_INLINE INLINE
#endif

// 8 x 8 matrices: a lane has two neighbours of a row, laid out as on Apple's GPUs.
template <class T, int C, int R> struct simdgroup_matrix {
    static_assert(C == 8 && R == 8, "simdgroup matrices are 8 x 8");
    float elements[2];
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
template <class T, int C, int R> INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, C, R> m;
    m.elements[0] = m.elements[1] = value;
    return m;
}
struct MatrixPlace {
    uint row, column;
    INLINE MatrixPlace() {
        const uint lane = msl_lane(), quad = lane / 4;
        row = (quad & 4) + lane / 2 % 4;
        column = (quad & 2) * 2 + lane % 2 * 2;
    }
};
#define MATRIX_ACCESS(SPACE)                                                                                          \
    template <class T>                                                                                                \
    MATRIX_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, SPACE const T* from, ulong stride = 8,            \
                                      ulong2 origin = ulong2(0ul), bool transposed = false,                           \
                                      uint line = __builtin_LINE()) {                                                 \
        msl_matrix_access(line);                                                                                      \
        const MatrixPlace at;                                                                                         \
        for (uint i = 0; i < 2; i++) {                                                                                \
            const ulong row = transposed ? at.column + i : at.row, column = transposed ? at.row : at.column + i;      \
            m.elements[i] = (float)from[(origin.y + row) * stride + origin.x + column];                               \
        }                                                                                                             \
    }                                                                                                                 \
    template <class T>                                                                                                \
    MATRIX_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, SPACE T* to, ulong stride = 8,             \
                                       uint line = __builtin_LINE()) {                                                \
        msl_matrix_access(line);                                                                                      \
        const MatrixPlace at;                                                                                         \
        for (uint i = 0; i < 2; i++) to[at.row * stride + at.column + i] = (T)m.elements[i];                          \
    }
MATRIX_ACCESS(device)
#ifdef MSL_TYPES
MATRIX_ACCESS(threadgroup)
#endif
template <class A, class B>
INLINE void simdgroup_multiply_accumulate(simdgroup_float8x8& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_float8x8& c,
                                          uint line = __builtin_LINE()) {
    msl_matrix_multiply(d.elements, a.elements, b.elements, c.elements, line);
}
template <class A, class B>
INLINE void simdgroup_multiply(simdgroup_float8x8& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, uint line = __builtin_LINE()) {
    const float zeros[2] = {};
    msl_matrix_multiply(d.elements, a.elements, b.elements, zeros, line);
}
} // namespace metal

// Kernels by name, and how their parameters are found. The translator writes the tables of parameters.
namespace msl {
struct Parameter {
    const char* builtin; // null: a buffer
    uint index;
};
struct Call {
    void* const* buffers;
    const ulong* lens;
};
struct Registration {
    Registration(const char* name, void (*run)(const Call&), const Parameter* parameters, uint n);
};
const uint* builtin(const char* name);
void too_small(uint index);

#ifndef MSL_TYPES
#pragma clang attribute push(__attribute__((no_sanitize("thread"))), apply_to = function)
template <class P> struct Argument {
    static P get(const Call&, const Parameter& p) {
        const uint* from = builtin(p.builtin);
        if constexpr (Shape<P>::n == 1) return (P)from[0];
        else {
            P v;
            for (int i = 0; i < Shape<P>::n; i++) v[i] = from[i];
            return v;
        }
    }
};
template <class T> struct Argument<T*> {
    static T* get(const Call& call, const Parameter& p) { return (T*)call.buffers[p.index]; }
};
template <class T> struct Argument<T&> {
    static T& get(const Call& call, const Parameter& p) {
        if (call.lens[p.index] != sizeof(T)) too_small(p.index);
        return *(T*)call.buffers[p.index];
    }
};
template <uint... I> struct Indices {};
template <uint N, uint... I> struct Count : Count<N - 1, N - 1, I...> {};
template <uint... I> struct Count<0, I...> { typedef Indices<I...> type; };
template <auto F, class... P, uint... I> void call(void (*)(P...), const Call& c, const Parameter* p, Indices<I...>) {
    F(Argument<P>::get(c, p[I])...);
}
template <class... P> constexpr uint arity(void (*)(P...)) { return sizeof...(P); }
template <auto F, auto& PARAMETERS> void run(const Call& c) {
    constexpr uint n = arity(F);
    static_assert(n == sizeof(PARAMETERS) / sizeof(Parameter));
    call<F>(F, c, PARAMETERS, typename Count<n>::type());
}
#pragma clang attribute pop

// Threadgroup memory; whatever is read or written behind it is neither another variable nor unnoticed.
template <class T> struct Shared {
    alignas(16) T memory;
    char guard[65536];
};
template <class T> INLINE T& declare(Shared<T>& shared, const char* name) {
    return *(T*)msl_shared(&shared.memory, sizeof shared.memory, name);
}
#define MSL_REGISTER(name, unique, parameters, ...)                                             \
    static msl::Registration unique(name, msl::run<&__VA_ARGS__, parameters>, parameters,       \
                                    sizeof parameters / sizeof(msl::Parameter));
#else
#define MSL_REGISTER(name, unique, parameters, ...) static auto unique = &__VA_ARGS__;
#endif
} // namespace msl
#define MSL_JOIN_(a, b) a##b
#define MSL_JOIN(a, b) MSL_JOIN_(a, b)
using metal::as_type;
