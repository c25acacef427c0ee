#include "report.hpp"

#include "settings.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace mpgpu_preload {
namespace {

constexpr auto outcomes = static_cast<std::size_t>(outcome::count);
constexpr auto kinds_taken = static_cast<std::size_t>(outcome::small);

/// Name of an outcome in reports, and advice for programs whose copies mostly have this outcome.
struct outcome_text {
    const char *name;
    const char *remedy;
};

constexpr std::array<outcome_text, outcomes> texts = {{
    {"GPU to GPU", ""},
    {"host memory to GPU", ""},
    {"GPU to host memory", ""},
    {"smaller than MPGPU_PRELOAD_MIN_BYTES", "lower MPGPU_PRELOAD_MIN_BYTES, or combine small copies"},
    {"not faster with mpgpu", "allow idle GPUs to relay data by MPGPU_PRELOAD_GPUS=all"},
    {"made while mpgpu prepared its context or a plan", "a program gains if it copies for a second or longer"},
    {"captured into a CUDA graph", "use mpgpu's functions in the program; they can be captured"},
    {"neither source nor destination is GPU memory", "none; such copies use no link of a GPU"},
    {"managed memory", "allocate with cudaMalloc or cudaMallocHost"},
    {"memory of a pool or of cuMemMap that the GPUs may not access", "give the other GPUs access to the pool"},
    {"memory of another process, on an unknown GPU", "run all processes under mpgpu run"},
    {"memory of a GPU that the program does not use (MPGPU_PRELOAD_GPUS)", "set MPGPU_PRELOAD_GPUS=all"},
    {"a CUDA context that is not the primary context of its GPU", "use primary contexts, as the CUDA runtime does"},
    {"mpgpu could not create its context", "see the message above"},
    {"refused by mpgpu", "MPGPU_LOG=debug prints the reason"},
    {"batches of copies", "none; only batches of small pieces of pinned memory gain"},
}};

struct counter {
    std::atomic<std::uint64_t> copies;
    std::atomic<std::uint64_t> bytes;
};

struct sums {
    std::atomic<std::uint64_t> saved_nanoseconds;
    std::atomic<std::uint64_t> compared;
    std::atomic<std::uint64_t> wrong;
    std::array<counter, outcomes> counters;
};

/// Counters in memory that `mpgpu run` shares with the processes that it starts (`rust/cli/run/sums.rs` reads them).
/// The counts are in shared memory, so those of a killed process are not lost. Each process writes the same texts.
struct shared_sums {
    std::array<char, 8> mark;
    std::atomic<std::uint64_t> taken_kinds;
    std::atomic<std::uint64_t> all_kinds;
    std::atomic<std::uint64_t> processes;
    sums all;
    std::array<std::array<char, 96>, outcomes> names;
    std::array<std::array<char, 96>, outcomes> remedies;
};

constexpr std::array<char, 8> mark = {'m', 'p', 'g', 'p', 'u', 's', 'u', 'm'};
constexpr off_t shared_bytes = 4096;
static_assert(sizeof(shared_sums) <= shared_bytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

sums own;
std::atomic<bool> has_counted;

/// Maps the counters that `mpgpu run` shares with this process, or returns null if there are none. The path in the
/// environment may be left over from an `mpgpu run` that has ended, and may now belong to another file. Only sealed
/// memory with the right mark is therefore written.
shared_sums *open_sums() {
    const char *name = std::getenv("MPGPU_PRELOAD_SUMS");
    const int file = name == nullptr ? -1 : open(name, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        return nullptr;
    }
    struct stat status {};
    constexpr int sealed = F_SEAL_SHRINK | F_SEAL_GROW;
    const int seals = fcntl(file, F_GET_SEALS);
    void *mapped = MAP_FAILED;
    if (seals >= 0 && (seals & sealed) == sealed && fstat(file, &status) == 0 && status.st_size == shared_bytes) {
        mapped = mmap(nullptr, shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    auto *const found = mapped == MAP_FAILED ? nullptr : static_cast<shared_sums *>(mapped);
    if (found == nullptr || found->mark != mark) {
        return nullptr;
    }
    for (std::size_t i = 0; i < outcomes; ++i) {
        std::strncpy(found->names[i].data(), texts[i].name, found->names[i].size() - 1);
        std::strncpy(found->remedies[i].data(), texts[i].remedy, found->remedies[i].size() - 1);
    }
    found->taken_kinds = kinds_taken;
    found->all_kinds = outcomes;
    return found;
}

shared_sums *shared() {
    static shared_sums *const found = open_sums();
    return found;
}

void add(std::atomic<std::uint64_t> &to, std::uint64_t what) {
    to.fetch_add(what, std::memory_order_relaxed);
}

/// Returns one line for each outcome that occurred. The text is empty if the program has not copied.
std::string report() {
    std::string text;
    const auto line = [&](const char *format, auto... arguments) {
        std::array<char, 256> buffer{};
        std::snprintf(buffer.data(), buffer.size(), format, arguments...);
        text += buffer.data();
    };
    const auto pid = static_cast<long>(getpid());
    for (std::size_t i = 0; i < outcomes; ++i) {
        const auto copies = own.counters[i].copies.load(std::memory_order_relaxed);
        const auto bytes = own.counters[i].bytes.load(std::memory_order_relaxed);
        if (copies != 0) {
            line("mpgpu[%ld]: %-14s %8llu copies, %14llu bytes: %s\n", pid,
                 i < kinds_taken ? "accelerated" : "passed through", static_cast<unsigned long long>(copies),
                 static_cast<unsigned long long>(bytes), texts[i].name);
        }
    }
    if (own.saved_nanoseconds.load() != 0) {
        line("mpgpu[%ld]: time saved: %.6f s (measured or modelled)\n", pid,
             static_cast<double>(own.saved_nanoseconds.load()) * 1e-9);
    }
    if (!text.empty() && asked().verify) {
        line("mpgpu[%ld]: %llu accelerated copies compared byte by byte, %llu wrong\n", pid,
             static_cast<unsigned long long>(own.compared.load()), static_cast<unsigned long long>(own.wrong.load()));
    }
    return text;
}

/// Opens the report's file for appending. Returns -1 with `ENXIO` if it is not a regular file. A FIFO, for example,
/// would block the end of the program until a reader opens it.
int open_report(const char *path) {
    const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0600);
    struct stat status {};
    if (file >= 0 && (fstat(file, &status) != 0 || !S_ISREG(status.st_mode))) {
        close(file);
        errno = ENXIO;
        return -1;
    }
    return file;
}

} // namespace

void count(outcome what, std::size_t bytes, double saved_seconds) {
    const auto in = [&](sums &to) {
        auto &counter = to.counters[static_cast<std::size_t>(what)];
        add(counter.copies, 1);
        add(counter.bytes, bytes);
        if (saved_seconds > 0) {
            add(to.saved_nanoseconds, static_cast<std::uint64_t>(saved_seconds * 1e9));
        }
    };
    in(own);
    if (shared() != nullptr) {
        in(shared()->all);
        if (!has_counted.load(std::memory_order_relaxed) && !has_counted.exchange(true)) {
            add(shared()->processes, 1);
        }
    }
}

void count_compared(bool equal) {
    const auto in = [&](sums &to) {
        add(to.compared, 1);
        add(to.wrong, equal ? 0 : 1);
    };
    in(own);
    if (shared() != nullptr) {
        in(shared()->all);
    }
}

void forget_counts() {
    for (auto &counter : own.counters) {
        counter.copies = 0;
        counter.bytes = 0;
    }
    own.saved_nanoseconds = 0;
    own.compared = 0;
    own.wrong = 0;
    has_counted = false;
}

void write_report() {
    const char *to = asked().report;
    const std::string text = to == nullptr ? std::string() : report();
    if (text.empty()) {
        return;
    }
    // All processes of a job may write to one file, so each process writes its lines in a single call.
    const bool is_stderr = std::strcmp(to, "stderr") == 0;
    const int file = is_stderr ? STDERR_FILENO : open_report(to);
    if (file < 0 || write(file, text.data(), text.size()) < 0) {
        std::fprintf(stderr, "mpgpu: MPGPU_PRELOAD_REPORT=%s: %s\n", to,
                     errno == ENXIO ? "is not a regular file; pass the path of one, or stderr" : std::strerror(errno));
    }
    if (file >= 0 && !is_stderr) {
        close(file);
    }
}

} // namespace mpgpu_preload
