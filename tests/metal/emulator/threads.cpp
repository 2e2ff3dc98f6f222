// Threads of a threadgroup are fibers: each runs until it waits for its simdgroup (a collective) or its threadgroup (a
// barrier). A lane that others wait for in vain is reported.
#include "emulator.h"
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>

namespace msl {
struct Parameter {
    const char* builtin;
    u32 index;
};
struct Call {
    void* const* buffers;
    const unsigned long* lens;
};
struct Registration {
    Registration(const char* name, void (*run)(const Call&), const Parameter* parameters, u32 n);
};
} // namespace msl

namespace {

struct Kernel {
    void (*run)(const msl::Call&);
    std::vector<msl::Parameter> parameters;
};
std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

constexpr size_t STACK = 128 << 10;
constexpr u32 MAX_THREADS = 1024, LANES = 32;

enum State { READY, IN_COLLECTIVE, AT_BARRIER, DONE };

struct Fiber {
    void* stack_pointer;
    State state;
    u32 line, flags; // of what it waits for
};

enum Operation : u32 { SUM, LARGEST, SMALLEST, SUM_UINT, LARGEST_UINT, SMALLEST_UINT, SHUFFLE_XOR, PREFIX_SUM, MULTIPLY, ACCESS, BARRIER };

// Lanes that have arrived at a collective, what they brought, and what the last complete one gave them.
struct Simdgroup {
    u32 exist, arrived;
    Operation operation;
    u32 line, flags;
    union Value {
        float f;
        u32 u;
        float matrix[6]; // a, b, c
    } in[LANES];
    union Result {
        float f;
        u32 u;
        float matrix[2];
    } out[LANES];
    u32 device_epoch, shared_epoch;
};

const Dispatch* dispatch;
const Kernel* running;
char* stacks;
std::vector<Fiber> fibers;
std::vector<Simdgroup> simdgroups;
void* scheduler;
int current = -1;
u32 group_at[3];
u32 group, first, device_epoch, shared_epoch;
std::string report;
u64 random_state;

extern "C" void msl_switch(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch
msl_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
void* new_stack(char* top, void (*entry)()) {
    void** sp = (void**)top;
    *--sp = nullptr; // keeps the stack aligned as after a call
    *--sp = (void*)entry;
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    return sp;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl msl_switch
msl_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
void* new_stack(char* top, void (*entry)()) {
    void** sp = (void**)top - 20;
    memset(sp, 0, 160);
    sp[11] = (void*)entry;
    return sp;
}
#else
#error "a context switch for this CPU"
#endif

void to_scheduler() { msl_switch(&fibers[current].stack_pointer, scheduler); }

void fiber_main() {
    running->run(msl::Call{dispatch->buffers.data(), dispatch->lens.data()});
    fibers[current].state = DONE;
    to_scheduler();
    abort();
}

void resume(u32 thread) {
    current = thread;
    msl_switch(&scheduler, fibers[thread].stack_pointer);
    current = -1;
}

// Ends the dispatch from the scheduler.
void stop(const char* format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    report = text;
}

// The lane that has elements (row, column) and (row, column + 1) of a matrix, column even.
u32 lane_of(u32 row, u32 column) { return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column & 2) >> 1; }

template <class T> T combine(u32 operation, T a, T b) {
    return operation % 3 == 0 ? a + b : operation % 3 == 1 ? std::max(a, b) : std::min(a, b);
}
// As a tree over neighbours.
template <class T, class Get> T reduce(u32 operation, Get get) {
    T values[LANES];
    for (u32 i = 0; i < LANES; i++) values[i] = get(i);
    for (u32 step = 1; step < LANES; step *= 2) {
        for (u32 i = 0; i < LANES; i += 2 * step) values[i] = combine(operation, values[i], values[i + step]);
    }
    return values[0];
}

// All lanes have arrived: gives each its result.
void complete(Simdgroup& s) {
    switch (s.operation) {
    case SUM: case LARGEST: case SMALLEST: {
        const float value = reduce<float>(s.operation, [&](u32 i) { return s.in[i].f; });
        for (auto& out : s.out) out.f = value;
        break;
    }
    case SUM_UINT: case LARGEST_UINT: case SMALLEST_UINT: {
        const u32 value = reduce<u32>(s.operation, [&](u32 i) { return s.in[i].u; });
        for (auto& out : s.out) out.u = value;
        break;
    }
    case SHUFFLE_XOR:
        for (u32 i = 0; i < LANES; i++) s.out[i].f = s.in[i ^ s.flags].f;
        break;
    case PREFIX_SUM: {
        u32 sum = 0;
        for (u32 i = 0; i < LANES; i++) {
            s.out[i].u = sum;
            sum += s.in[i].u;
        }
        break;
    }
    case MULTIPLY: {
        counters.multiplied++;
        float a[8][8], b[8][8];
        for (u32 i = 0; i < 64; i++) {
            const float* m = s.in[lane_of(i / 8, i % 8 & ~1)].matrix;
            a[i / 8][i % 8] = m[i % 2];
            b[i / 8][i % 8] = m[2 + i % 2];
        }
        for (u32 i = 0; i < 64; i++) {
            const u32 lane = lane_of(i / 8, i % 8 & ~1);
            float sum = s.in[lane].matrix[4 + i % 2];
            for (u32 k = 0; k < 8; k++) sum = __builtin_fmaf(a[i / 8][k], b[k][i % 8], sum);
            s.out[lane].matrix[i % 2] = sum;
        }
        break;
    }
    case ACCESS:
        break;
    case BARRIER:
        if (s.flags & 1) s.device_epoch++;
        if (s.flags & 2) s.shared_epoch++;
        break;
    }
    const u32 base = (&s - simdgroups.data()) * LANES;
    for (u32 i = 0; i < LANES; i++) {
        if (s.exist >> i & 1 && fibers[base + i].state == IN_COLLECTIVE) fibers[base + i].state = READY;
    }
    s.arrived = 0;
}

// Brings this lane to a collective and returns its result.
const Simdgroup::Result& collective(Operation operation, u32 flags, const Simdgroup::Value& value, u32 line) {
    Fiber& fiber = fibers[current];
    Simdgroup& s = simdgroups[current / LANES];
    const u32 lane = current % LANES;
    if (s.exist != ~0u) fail("line %u: a collective in a simdgroup that is not full", line);
    if (s.arrived == 0) {
        s.operation = operation;
        s.line = line;
        s.flags = flags;
    } else if (s.operation != operation || s.line != line || s.flags != flags) {
        fail("divergent collective: lanes of a simdgroup are in line %u and in line %u", s.line, line);
    }
    s.in[lane] = value;
    s.arrived |= 1u << lane;
    fiber.line = line;
    if (s.arrived == s.exist) {
        complete(s);
    } else {
        fiber.state = IN_COLLECTIVE;
        to_scheduler();
    }
    return s.out[lane];
}

u32 random_below(u32 n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (random_state >> 33) % n;
}
void shuffle(std::vector<u32>& order, u32 begin, u32 end) {
    for (u32 i = end - 1; i > begin; i--) std::swap(order[i], order[begin + random_below(i - begin + 1)]);
}

// Lets the lanes of a simdgroup run until all are done or at a barrier.
bool run_simdgroup(u32 s, const std::vector<u32>& order) {
    const u32 begin = s * LANES, end = std::min<u32>(begin + LANES, dispatch->threads);
    for (bool progress = true; progress;) {
        progress = false;
        for (u32 i = begin; i < end; i++) {
            if (fibers[order[i]].state != READY) continue;
            progress = true;
            resume(order[i]);
            if (!report.empty()) return false;
        }
    }
    if (simdgroups[s].arrived == 0) return true;
    const u32 missing = begin + __builtin_ctz(simdgroups[s].exist & ~simdgroups[s].arrived);
    const bool done = fibers[missing].state == DONE;
    stop("divergent collective: lane %u never reaches line %u, it %s", missing % LANES, simdgroups[s].line,
         done ? "has returned" : "waits at a barrier");
    return false;
}

void run_group() {
    const u32 n = dispatch->threads, n_simdgroups = (n + LANES - 1) / LANES;
    group = next_group();
    device_epoch = shared_epoch = 1;
    simdgroups.assign(n_simdgroups, Simdgroup{});
    for (u32 s = 0; s < n_simdgroups; s++) {
        const u32 lanes = std::min(LANES, n - s * LANES);
        simdgroups[s].exist = lanes == LANES ? ~0u : (1u << lanes) - 1;
        simdgroups[s].device_epoch = simdgroups[s].shared_epoch = 1;
    }
    std::vector<u32> order(n), simdgroup_order(n_simdgroups);
    for (u32 i = 0; i < n; i++) {
        order[i] = i;
        fibers[i] = Fiber{new_stack(stacks + (i + 1) * STACK, fiber_main), READY, 0, 0};
    }
    for (u32 s = 0; s < n_simdgroups; s++) simdgroup_order[s] = s;
    for (;;) {
        if (dispatch->seed != 0) {
            shuffle(simdgroup_order, 0, n_simdgroups);
            for (u32 s = 0; s < n_simdgroups; s++) shuffle(order, s * LANES, std::min(n, (s + 1) * LANES));
        }
        for (u32 s : simdgroup_order) {
            if (!run_simdgroup(s, order)) return;
        }
        u32 done = n, waits = n;
        for (u32 i = 0; i < n; i++) (fibers[i].state == DONE ? done : waits) = i;
        if (waits == n) return;
        if (done != n) {
            return stop("divergent barrier: thread %u waits in line %u, thread %u has returned", waits, fibers[waits].line, done);
        }
        for (u32 i = 0; i < n; i++) {
            if (fibers[i].line != fibers[waits].line) {
                return stop("divergent barrier: thread %u waits in line %u, thread %u in line %u", waits, fibers[waits].line, i,
                            fibers[i].line);
            }
            fibers[i].state = READY;
        }
        if (fibers[0].flags & 1) device_epoch++;
        if (fibers[0].flags & 2) shared_epoch++;
    }
}

} // namespace

msl::Registration::Registration(const char* name, void (*run)(const Call&), const Parameter* parameters, u32 n) {
    kernels()[name] = Kernel{run, std::vector<Parameter>(parameters, parameters + n)};
}

namespace msl {
const u32* builtin(const char* name) {
    static u32 value[3];
    const u32 thread = current, n = dispatch->threads;
    auto is = [&](const char* other) { return strcmp(name, other) == 0; };
    auto set = [&](u32 x, u32 y, u32 z) {
        value[0] = x;
        value[1] = y;
        value[2] = z;
        return value;
    };
    if (is("threadgroup_position_in_grid")) return group_at;
    if (is("threadgroups_per_grid")) return dispatch->grid;
    if (is("thread_position_in_grid")) return set(group_at[0] * n + thread, group_at[1], group_at[2]);
    if (is("thread_index_in_threadgroup")) return set(thread, 0, 0);
    if (is("thread_index_in_simdgroup")) return set(thread % LANES, 0, 0);
    if (is("simdgroup_index_in_threadgroup")) return set(thread / LANES, 0, 0);
    fail("the emulator does not know [[%s]]", name);
}
void too_small(u32 index) { fail("arguments: buffer %u does not have the size of its structure", index); }
} // namespace msl

void fail(const char* format, ...) {
    char text[600];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(text, 480, format, args);
    va_end(args);
    snprintf(text + std::min(n, 479), 120, " [threadgroup (%u, %u, %u), thread %d]", group_at[0], group_at[1], group_at[2], current);
    report = text;
    fibers[current].state = DONE;
    to_scheduler();
    abort();
}

bool on_kernel_thread() { return current >= 0; }
bool on_own_stack(const char* p) { return p >= stacks && p < stacks + STACK * MAX_THREADS; }
u32 first_group() { return first; }
u32 next_group() {
    static u32 last = 0;
    return ++last;
}
Now now() {
    const Simdgroup& s = simdgroups[current / LANES];
    const u32 thread = current;
    return {{group, thread, device_epoch, s.device_epoch}, {group, thread, shared_epoch, s.shared_epoch}};
}

std::string run(const Dispatch& d) {
    if (!stacks) {
        stacks = (char*)mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        fibers.resize(MAX_THREADS);
    }
    auto found = kernels().find(d.kernel);
    if (found == kernels().end()) return "no kernel has this name";
    if (d.threads == 0 || d.threads > MAX_THREADS) return "threads per threadgroup are not in 1..1024";
    for (const auto& p : found->second.parameters) {
        if (!p.builtin && p.index >= d.buffers.size()) return "a buffer is not bound";
    }
    dispatch = &d;
    running = &found->second;
    report.clear();
    random_state = d.seed;
    first = next_group();
    const u64 n = u64(d.grid[0]) * d.grid[1] * d.grid[2];
    for (u64 i = 0; i < n && report.empty(); i++) {
        const u64 at = d.seed == 0 ? i : n - 1 - i;
        group_at[0] = at % d.grid[0];
        group_at[1] = at / d.grid[0] % d.grid[1];
        group_at[2] = at / d.grid[0] / d.grid[1];
        run_group();
    }
    dispatch = nullptr;
    return report;
}

// ---- called by kernels ----

extern "C" {
u64 msl_operations = 0;

void msl_barrier(u32 flags, u32 line) {
    Fiber& fiber = fibers[current];
    fiber.line = line;
    fiber.flags = flags;
    fiber.state = AT_BARRIER;
    to_scheduler();
}
void msl_simdgroup_barrier(u32 flags, u32 line) { collective(BARRIER, flags, {}, line); }
float msl_reduce_float(u32 operation, float value, u32 line) {
    return collective(Operation(operation), 0, Simdgroup::Value{.f = value}, line).f;
}
u32 msl_reduce_uint(u32 operation, u32 value, u32 line) {
    return collective(Operation(operation + SUM_UINT), 0, Simdgroup::Value{.u = value}, line).u;
}
float msl_shuffle_xor(float value, u32 mask, u32 line) {
    if (mask >= LANES) fail("undefined: a shuffle from lane %u in line %u", (current % LANES) ^ mask, line);
    return collective(SHUFFLE_XOR, mask, Simdgroup::Value{.f = value}, line).f;
}
u32 msl_prefix_sum(u32 value, u32 line) { return collective(PREFIX_SUM, 0, Simdgroup::Value{.u = value}, line).u; }
void msl_matrix_multiply(float* d, const float* a, const float* b, const float* c, u32 line) {
    const Simdgroup::Value value{.matrix = {a[0], a[1], b[0], b[1], c[0], c[1]}};
    const auto& result = collective(MULTIPLY, 0, value, line);
    d[0] = result.matrix[0];
    d[1] = result.matrix[1];
}
void msl_matrix_access(u32 line) { collective(ACCESS, 0, {}, line); }
u32 msl_lane() { return current % LANES; }
}
