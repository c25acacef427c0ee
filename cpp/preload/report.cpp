#include "report.hpp"

#include "settings.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <unistd.h>

namespace mpgpu_preload {
namespace {

constexpr auto outcomes = static_cast<std::size_t>(outcome::count);
constexpr auto kinds_taken = static_cast<std::size_t>(outcome::small);

constexpr std::array<const char *, outcomes> texts = {
    "GPU to GPU",
    "pinned host memory to GPU",
    "GPU to pinned host memory",
    "small",
    "no gain by the plan",
    "while the first plans are made",
    "captured",
    "host memory that is not pinned, or no GPU's memory at all",
    "managed memory",
    "memory of a pool or a mapping",
    "memory of another process, of which nothing is known",
    "memory of a GPU that the program does not use (MPGPU_PRELOAD_GPUS)",
    "a context that is not primary, or not the memory's",
    "mpgpu has no context",
    "refused by mpgpu",
};

struct counter {
    std::atomic<std::uint64_t> copies;
    std::atomic<std::uint64_t> bytes;
};

std::array<counter, outcomes> counters;
std::atomic<std::uint64_t> saved_nanoseconds;
std::atomic<std::uint64_t> compared;
std::atomic<std::uint64_t> wrong;

void add(std::atomic<std::uint64_t> &to, std::uint64_t what) {
    to.fetch_add(what, std::memory_order_relaxed);
}

/// One line for each outcome that there was. Empty where the program has not copied.
std::string report() {
    std::string text;
    const auto line = [&](const char *format, auto... arguments) {
        std::array<char, 256> buffer{};
        std::snprintf(buffer.data(), buffer.size(), format, arguments...);
        text += buffer.data();
    };
    const auto pid = static_cast<long>(getpid());
    for (std::size_t i = 0; i < outcomes; ++i) {
        const auto copies = counters[i].copies.load(std::memory_order_relaxed);
        const auto bytes = counters[i].bytes.load(std::memory_order_relaxed);
        if (copies != 0) {
            line("mpgpu[%ld]: %-6s %8llu copies, %14llu bytes: %s\n", pid, i < kinds_taken ? "taken" : "passed",
                 static_cast<unsigned long long>(copies), static_cast<unsigned long long>(bytes), texts[i]);
        }
    }
    if (saved_nanoseconds.load() != 0) {
        line("mpgpu[%ld]: saved %.6f s, as modelled\n", pid, static_cast<double>(saved_nanoseconds.load()) * 1e-9);
    }
    if (!text.empty() && asked().verify) {
        line("mpgpu[%ld]: %llu taken copies compared byte by byte, %llu wrong\n", pid,
             static_cast<unsigned long long>(compared.load()), static_cast<unsigned long long>(wrong.load()));
    }
    return text;
}

} // namespace

void count(outcome what, std::size_t bytes, double saved_seconds) {
    auto &counter = counters[static_cast<std::size_t>(what)];
    add(counter.copies, 1);
    add(counter.bytes, bytes);
    if (saved_seconds > 0) {
        add(saved_nanoseconds, static_cast<std::uint64_t>(saved_seconds * 1e9));
    }
}

void count_compared(bool equal) {
    add(compared, 1);
    add(wrong, equal ? 0 : 1);
}

void forget_counts() {
    for (auto &counter : counters) {
        counter.copies = 0;
        counter.bytes = 0;
    }
    saved_nanoseconds = 0;
    compared = 0;
    wrong = 0;
}

void write_report() {
    const char *to = asked().report;
    const std::string text = to == nullptr ? std::string() : report();
    if (text.empty()) {
        return;
    }
    // Processes of a job write to one file: each its lines at once.
    const bool is_stderr = std::strcmp(to, "stderr") == 0;
    const int file = is_stderr ? STDERR_FILENO : open(to, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0 || write(file, text.data(), text.size()) < 0) {
        std::fprintf(stderr, "mpgpu: MPGPU_PRELOAD_REPORT=%s: %s\n", to, std::strerror(errno));
    }
    if (file >= 0 && !is_stderr) {
        close(file);
    }
}

} // namespace mpgpu_preload
