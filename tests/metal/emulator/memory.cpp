// Every access of a kernel's threads comes here: clang's ThreadSanitizer pass inserts the calls, we answer them.
#include "emulator.h"
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <unistd.h>

Counters counters;
extern "C" char __executable_start, __bss_start;

namespace {

// Bound regions by address, and threadgroup memory by address; those of kernels that do not run stay known.
std::vector<Region*> bound;
std::map<void*, std::unique_ptr<Region>> shared_regions;
std::map<void*, u32> shared_in_group; // the last threadgroup that declared it
Region* last_hit = nullptr;
u64 shared_total = 0; // bytes that the last threadgroup declared
u32 shared_total_group = 0;
u32 fenced_until = 0; // threadgroups up to this one finished before the last fence

// The source line of a program address: the innermost one in a shader.
std::string place(void* pc) {
    static std::map<void*, std::string> known;
    auto found = known.find(pc);
    if (found != known.end()) return found->second;
    char command[256], line[512];
    snprintf(command, sizeof command, "addr2line -i -e /proc/%d/exe %p 2>/dev/null", (int)getpid(), (void*)((char*)pc - 1));
    std::string result = "an unknown line";
    if (FILE* pipe = popen(command, "r")) {
        while (fgets(line, sizeof line, pipe)) {
            std::string text(line, strcspn(line, "\n"));
            if (text.find(".metal:") == std::string::npos && text.find("/emulator/") != std::string::npos) continue;
            result = text.substr(text.rfind('/') + 1);
            break;
        }
        pclose(pipe);
    }
    return known[pc] = result;
}

Region* region_at(const char* p) {
    auto inside = [&](const Region* r) { return p >= r->at && p < r->at + r->bytes; };
    if (last_hit && inside(last_hit)) return last_hit;
    auto next = std::upper_bound(bound.begin(), bound.end(), p, [](const char* p, const Region* r) { return p < r->at; });
    if (next != bound.begin() && inside(next[-1])) return last_hit = next[-1];
    for (auto& [at, region] : shared_regions) {
        if (inside(region.get())) return last_hit = region.get();
    }
    return nullptr;
}

[[noreturn]] void out_of_bounds(const char* p, u64 bytes, bool write, void* pc) {
    std::string nearest = "no buffer is near";
    u64 distance = 1 << 20;
    auto look = [&](const Region* r) {
        const u64 behind = p - (r->at + r->high), before = r->at + r->low - p;
        if (std::min(behind, before) >= distance) return;
        distance = std::min(behind, before);
        nearest = std::to_string(distance) + (behind < before ? " bytes behind the " : " bytes before the ") +
                  std::to_string(r->high - r->low) + " of " + r->name;
    };
    for (const Region* r : bound) look(r);
    for (const auto& shared : shared_regions) look(shared.second.get());
    fail("out of bounds: %s of %llu bytes, %s, in %s", write ? "write" : "read", (unsigned long long)bytes, nearest.c_str(),
         place(pc).c_str());
}

enum Order { ORDERED, RACE, HAZARD };

// Whether what happened at `before` is finished for `now`.
Order order(const Stamp& before, const Stamp& now) {
    if (before.group <= fenced_until) return ORDERED;
    if (before.group < first_group()) return HAZARD;
    if (before.group != now.group) return RACE;
    if (before.thread == now.thread || before.epoch != now.epoch) return ORDERED;
    return before.thread / 32 == now.thread / 32 && before.simdgroup_epoch != now.simdgroup_epoch ? ORDERED : RACE;
}

// Whether all readers of a cell are finished for a write at `now`.
Order order_of_readers(const Cell& cell, const Stamp& now) {
    const Stamp& read = cell.read;
    if (cell.readers == NOBODY) return ORDERED;
    if (cell.readers == ONE_THREAD || read.group < first_group()) return order(read, now);
    if (cell.readers == SEVERAL_GROUPS || read.group != now.group) return RACE;
    if (read.epoch != now.epoch) return ORDERED;
    const bool same_simdgroup = read.thread / 32 == now.thread / 32;
    return cell.readers == ONE_SIMDGROUP && same_simdgroup && read.simdgroup_epoch != now.simdgroup_epoch ? ORDERED : RACE;
}

void note_reader(Cell& cell, const Stamp& now) {
    const Stamp& read = cell.read;
    const auto only_now = [&] {
        cell.readers = ONE_THREAD;
        cell.read = now;
    };
    if (cell.readers == NOBODY || read.group <= fenced_until) return only_now();
    // Readers of an earlier dispatch stay: against what follows they are the stronger evidence.
    if (read.group < first_group() || cell.readers == SEVERAL_GROUPS) return;
    if (read.group != now.group) {
        cell.readers = SEVERAL_GROUPS;
        cell.read = now;
    } else if (read.epoch != now.epoch) {
        only_now();
    } else if (read.thread / 32 != now.thread / 32) {
        cell.readers = ONE_GROUP;
    } else if (cell.readers != ONE_GROUP && read.simdgroup_epoch != now.simdgroup_epoch) {
        only_now();
    } else if (cell.readers == ONE_THREAD && read.thread != now.thread) {
        cell.readers = ONE_SIMDGROUP;
    }
}

[[noreturn]] void conflict(Order found, const Region& r, u64 offset, bool write, const char* earlier, const Stamp& by, void* pc) {
    if (found == HAZARD) {
        fail("hazard: %s of %s at %llu after a %s by an earlier dispatch, without a fence between them, in %s",
             write ? "write" : "read", r.name.c_str(), (unsigned long long)offset, earlier, place(pc).c_str());
    }
    const Now t = now();
    fail("race: %s of %s at %llu after a %s by thread %u%s, in %s", write ? "write" : "read", r.name.c_str(),
         (unsigned long long)offset, earlier, by.thread, by.group == t.device.group ? "" : " of another threadgroup",
         place(pc).c_str());
}

void access(char* p, u64 bytes, bool write, u64 align, void* pc) {
    if (!on_kernel_thread() || on_own_stack(p)) return;
    Region* r = region_at(p);
    if (!r) {
        // Constants of the program.
        if (!write && p >= &__executable_start && p < &__bss_start) return;
        out_of_bounds(p, bytes, write, pc);
    }
    const u64 offset = p - r->at;
    if (offset < r->low) out_of_bounds(p, bytes, write, pc);
    if (offset + bytes > r->high) {
        const u64 beyond = std::max(offset, r->high);
        out_of_bounds(r->at + beyond, offset + bytes - beyond, write, pc);
    }
    if ((u64)p % align != 0) {
        fail("misaligned: %llu bytes of %s at %llu, in %s", (unsigned long long)align, r->name.c_str(), (unsigned long long)offset,
             place(pc).c_str());
    }
    const Now t = now();
    const Stamp& stamp = r->shared ? t.shared : t.device;
    for (u64 i = offset / 2; i <= (offset + bytes - 1) / 2; i++) {
        Cell& cell = r->cells[i];
        if (!write && !(r->shared ? cell.written.group == stamp.group : cell.initialised)) {
            fail("uninitialised: read of %s at %llu, in %s", r->name.c_str(), (unsigned long long)(2 * i), place(pc).c_str());
        }
        // Threadgroup memory of another threadgroup is another memory.
        if (!r->shared || cell.written.group == stamp.group) {
            const Order found = order(cell.written, stamp);
            if (found != ORDERED) conflict(found, *r, 2 * i, write, "write", cell.written, pc);
        }
        if (write) {
            if (!r->shared || cell.read.group == stamp.group) {
                const Order found = order_of_readers(cell, stamp);
                if (found != ORDERED) conflict(found, *r, 2 * i, write, "read", cell.read, pc);
            }
            cell.written = stamp;
            cell.readers = NOBODY;
            cell.initialised = true;
        } else {
            if (r->shared && cell.read.group != stamp.group) cell.readers = NOBODY;
            note_reader(cell, stamp);
        }
        if (!r->shared && !write && cell.counted != stamp.group) {
            if (cell.counted < first_group()) counters.unique_read += 2;
            counters.distinct_read += 2;
            cell.counted = stamp.group;
        }
    }
    if (!r->shared && write) counters.written += bytes;
}

} // namespace

void memory_begin(std::vector<Region*> regions) {
    bound = std::move(regions);
    std::sort(bound.begin(), bound.end(), [](const Region* a, const Region* b) { return a->at < b->at; });
    last_hit = nullptr;
    shared_total = 0;
}
void memory_end() { bound.clear(); }
void memory_fence() { fenced_until = next_group(); }
u64 shared_bytes() { return shared_total; }

extern "C" {
void* msl_shared(void* memory, unsigned long bytes, const char* name) {
    auto& region = shared_regions[memory];
    if (!region) region = std::make_unique<Region>((char*)memory, bytes, std::string("threadgroup ") + name, true);
    const u32 group = now().shared.group;
    if (shared_total_group != group) {
        shared_total_group = group;
        shared_total = 0;
    }
    u32& declared = shared_in_group[memory];
    if (declared != group) {
        declared = group;
        shared_total += bytes;
        if (shared_total > 32768) fail("threadgroup memory: %llu bytes of 32768", (unsigned long long)shared_total);
    }
    return memory;
}

#define HERE __builtin_return_address(0)
#define ACCESS(N)                                                                                      \
    void __tsan_read##N(void* p) { access((char*)p, N, false, N, HERE); }                              \
    void __tsan_write##N(void* p) { access((char*)p, N, true, N, HERE); }                              \
    void __tsan_unaligned_read##N(void* p) { access((char*)p, N, false, 1, HERE); }                    \
    void __tsan_unaligned_write##N(void* p) { access((char*)p, N, true, 1, HERE); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void* __tsan_memcpy(void* to, const void* from, size_t n) {
    if (n != 0) access((char*)from, n, false, 1, HERE);
    if (n != 0) access((char*)to, n, true, 1, HERE);
    return memmove(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
    if (n != 0) access((char*)from, n, false, 1, HERE);
    if (n != 0) access((char*)to, n, true, 1, HERE);
    return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
    if (n != 0) access((char*)to, n, true, 1, HERE);
    return memset(to, value, n);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// clang's checks of undefined behaviour; their data begin with the place.
struct Place {
    const char* file;
    u32 line, column;
};
static void undefined(const Place* place, const char* what) {
    if (!on_kernel_thread()) return;
    const char* name = strrchr(place->file, '/');
    fail("%s, in %s:%u", what, name ? name + 1 : place->file, place->line);
}
void __ubsan_handle_type_mismatch_v1(Place* place, uintptr_t) { undefined(place, "misaligned: a pointer"); }
void __ubsan_handle_out_of_bounds(Place* place, uintptr_t) { undefined(place, "out of bounds: an array's index"); }
void __ubsan_handle_shift_out_of_bounds(Place* place, uintptr_t, uintptr_t) { undefined(place, "undefined: a shift"); }
void __ubsan_handle_divrem_overflow(Place* place, uintptr_t, uintptr_t) { undefined(place, "undefined: a division"); }
}
