// A GPU behind standard input and output. Numbers are little-endian; a command is a byte and its operands:
//   B id:u32 bytes:u64 align:u32 filled:u8 [data]    makes a buffer at an address that is a multiple of `align`, and not of
//                                                    the next power of two
//   W id:u32 offset:u64 data:text                    fills a part of a buffer
//   P id:u32 offset:u64 target:u32                   writes the address of another buffer into a buffer
//   S id:u32 bytes:u64 path:text                     makes a buffer that is a file, to be shared; answers its address:u64
//   I id:u32                                         takes all of a buffer for written
//   X id:u32                                         forgets a buffer
//   D name:text n:u32 (id:u32 offset:u64 bytes:u64)* n:u32 (id:u32)* args:text grid:u32*3 threads:u32 seed:u32
//                                                    dispatches with parts of buffers (2^64 - 1 bytes: the rest), further
//                                                    buffers that may be reached through addresses, and arguments;
//                                                    answers report:text counters:u64*6
//   F                                                waits until what was dispatched is finished
//   R id:u32                                         answers status:u8 data:text; status 1: some of it was never written
// A text is its length as u64, then bytes.
#include "emulator.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <memory>
#include <sys/mman.h>
#include <unistd.h>

namespace {

void read(void* to, size_t n) {
    if (n != 0 && fread(to, n, 1, stdin) != 1) exit(0);
}
template <class T> T read() {
    T value;
    read(&value, sizeof value);
    return value;
}
std::string read_text() {
    std::string text(read<u64>(), '\0');
    read(text.data(), text.size());
    return text;
}
void write(const void* from, size_t n) { fwrite(from, 1, n, stdout); }
template <class T> void write(T value) { write(&value, sizeof value); }
void write_text(const void* from, u64 n) {
    write(n);
    write(from, n);
}

struct Buffer {
    std::unique_ptr<Region> region;
    char* mapped = nullptr;
    u64 mapped_bytes = 0;
    ~Buffer() {
        if (mapped) munmap(mapped, mapped_bytes);
    }
};
std::map<u32, Buffer> buffers;

// Space between buffers, so that what is behind one is not in another.
constexpr u64 GAP = 1 << 16;

void make_buffer() {
    const u32 id = read<u32>();
    const u64 bytes = read<u64>();
    const u32 align = read<u32>();
    const bool filled = read<uint8_t>() != 0;
    buffers.erase(id);
    Buffer& buffer = buffers[id];
    buffer.mapped_bytes = bytes + 2 * GAP + align;
    buffer.mapped = (char*)mmap(nullptr, buffer.mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char* at = buffer.mapped + GAP + align;
    buffer.region = std::make_unique<Region>(at, bytes, "buffer " + std::to_string(id), false);
    if (filled) read(at, bytes);
    else memset(at, 0xff, bytes); // not-a-number
    for (Cell& cell : buffer.region->cells) cell.initialised = filled;
}

void make_shared() {
    const u32 id = read<u32>();
    const u64 bytes = read<u64>();
    const std::string path = read_text();
    Buffer& buffer = buffers[id];
    const int file = open(path.c_str(), O_RDWR);
    buffer.mapped_bytes = bytes;
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || at == MAP_FAILED) {
        fprintf(stderr, "emulator: cannot map %s\n", path.c_str());
        exit(1);
    }
    close(file);
    buffer.mapped = (char*)at;
    buffer.region = std::make_unique<Region>(buffer.mapped, bytes, "page " + std::to_string(id), false);
    write((u64)at);
    fflush(stdout);
}

void take_for_written() {
    for (Cell& cell : buffers.at(read<u32>()).region->cells) cell.initialised = true;
}

void fill(Region& region, u64 offset, const void* from, u64 n) {
    memcpy(region.at + offset, from, n);
    for (u64 i = offset / 2; i < (offset + n + 1) / 2; i++) region.cells[i].initialised = true;
}

void write_part() {
    Region& region = *buffers.at(read<u32>()).region;
    const u64 offset = read<u64>();
    const std::string data = read_text();
    fill(region, offset, data.data(), data.size());
}

void write_pointer() {
    Region& into = *buffers.at(read<u32>()).region;
    const u64 offset = read<u64>();
    Region& target = *buffers.at(read<u32>()).region;
    fill(into, offset, &target.at, sizeof(char*));
}

void dispatch() {
    Dispatch d;
    d.kernel = read_text();
    std::vector<Region*> bound;
    const u32 n = read<u32>();
    for (u32 i = 0; i < n; i++) {
        Region& region = *buffers.at(read<u32>()).region;
        const u64 offset = read<u64>(), bytes = read<u64>();
        const u64 end = offset + std::min(bytes, region.bytes - offset);
        // A buffer that is bound twice is one region, all of whose parts count.
        const bool again = std::find(bound.begin(), bound.end(), &region) != bound.end();
        region.low = again ? std::min(region.low, offset) : offset;
        region.high = again ? std::max(region.high, end) : end;
        region.name = "buffer " + std::to_string(i);
        if (!again) bound.push_back(&region);
        d.buffers.push_back(region.at + offset);
        d.lens.push_back(end - offset);
    }
    for (u32 i = read<u32>(); i > 0; i--) {
        const u32 id = read<u32>();
        Region& region = *buffers.at(id).region;
        region.name = "page " + std::to_string(id);
        region.low = 0;
        region.high = region.bytes;
        bound.push_back(&region);
    }
    alignas(16) char args[4096];
    const std::string text = read_text();
    memcpy(args, text.data(), std::min(text.size(), sizeof args));
    Region arguments(args, text.size(), "arguments", false);
    for (Cell& cell : arguments.cells) cell.initialised = true;
    bound.push_back(&arguments);
    d.buffers.push_back(args);
    d.lens.push_back(text.size());
    read(d.grid, sizeof d.grid);
    d.threads = read<u32>();
    d.seed = read<u32>();

    counters = Counters{};
    msl_operations = 0;
    memory_begin(bound);
    const std::string report = run(d);
    memory_end();
    counters.operations = msl_operations;
    write_text(report.data(), report.size());
    for (u64 value : {counters.distinct_read, counters.unique_read, counters.written, counters.operations, counters.multiplied,
                      shared_bytes()}) {
        write(value);
    }
    fflush(stdout);
}

void read_buffer() {
    const Region& region = *buffers.at(read<u32>()).region;
    bool written = true;
    for (const Cell& cell : region.cells) written = written && cell.initialised;
    write<uint8_t>(written ? 0 : 1);
    write_text(region.at, region.bytes);
    fflush(stdout);
}

} // namespace

int main() {
    for (;;) {
        switch (read<char>()) {
        case 'B': make_buffer(); break;
        case 'S': make_shared(); break;
        case 'I': take_for_written(); break;
        case 'X': buffers.erase(read<u32>()); break;
        case 'W': write_part(); break;
        case 'P': write_pointer(); break;
        case 'D': dispatch(); break;
        case 'F': memory_fence(); break;
        case 'R': read_buffer(); break;
        default: fprintf(stderr, "emulator: unknown command\n"); return 1;
        }
    }
}
