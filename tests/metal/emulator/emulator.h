// The emulator's parts: threads (threads.cpp), memory (memory.cpp), and the process that hosts them (main.cpp).
// One dispatch runs at a time, one threadgroup at a time, on one CPU thread.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

typedef uint32_t u32;
typedef uint64_t u64;

// ---- memory ----

// When and by whom something was read or written. Threadgroups are numbered over all dispatches, from 1.
struct Stamp {
    u32 group = 0;
    u32 thread = 0;
    u32 epoch = 0;         // threadgroup barriers before it
    u32 simdgroup_epoch = 0; // simdgroup barriers before it
};

// Who read since the last write.
enum Readers : u32 { NOBODY, ONE_THREAD, ONE_SIMDGROUP, ONE_GROUP, SEVERAL_GROUPS };

// What is known of two bytes.
struct Cell {
    Stamp written, read;
    Readers readers = NOBODY;
    bool initialised = false;
    u32 counted = 0; // last threadgroup whose distinct bytes it was counted among
};

struct Region {
    char* at;
    u64 bytes;
    std::string name;
    bool shared; // threadgroup memory
    u64 low = 0, high; // the part that a dispatch may touch
    std::vector<Cell> cells;

    Region(char* at, u64 bytes, std::string name, bool shared)
        : at(at), bytes(bytes), name(std::move(name)), shared(shared), high(bytes), cells((bytes + 1) / 2) {}
};

struct Counters {
    u64 distinct_read = 0; // bytes of device memory, each once per threadgroup
    u64 unique_read = 0;   // the same, each once
    u64 written = 0;       // bytes of device memory
    u64 operations = 0;    // of lanes: arithmetic, conversions, comparisons
    u64 multiplied = 0;    // pairs of 8 x 8 matrices
};
extern Counters counters;

// Regions that the dispatch may touch; others are out of bounds.
void memory_begin(std::vector<Region*> bound);
void memory_end();
// Threadgroup memory of the group that runs: known from the first thread that reaches its declaration.
u64 shared_bytes();
// What was dispatched before is finished for what follows.
void memory_fence();

// ---- threads ----

struct Dispatch {
    std::string kernel;
    std::vector<void*> buffers;
    std::vector<unsigned long> lens;
    u32 grid[3], threads;
    u32 seed; // 0: lanes run in order; otherwise threads and threadgroups are shuffled
};
struct Now {
    Stamp device, shared;
};
// Runs a dispatch; the report of the first error, or nothing.
std::string run(const Dispatch& dispatch);
// Ends the dispatch with a report; only on a thread of the kernel.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
bool on_kernel_thread();
bool on_own_stack(const char* p);
Now now();
// Number of the first threadgroup of the dispatch.
u32 first_group();
u32 next_group();
extern "C" u64 msl_operations;
