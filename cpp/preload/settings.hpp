// Reads the interposer's environment variables, which docs/reference/environment.md describes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace mpgpu_preload {

constexpr std::uint64_t every_gpu = UINT64_MAX;

struct settings {
    /// `MPGPU_PRELOAD`.
    bool on = true;
    /// `MPGPU_PRELOAD_MIN_BYTES`: smaller copies are passed through.
    std::size_t min_bytes = std::size_t{1} << 20;
    /// Bit mask of the GPUs that mpgpu may use (`MPGPU_PRELOAD_GPUS`). Empty for the GPUs that the program uses.
    std::optional<std::uint64_t> gpus;
    /// True if `MPGPU_RELAY_GPUS` is set, which the library reads.
    bool names_relays = false;
    /// `MPGPU_PRELOAD_REPORT`: `stderr`, a path, or null. A copy of the text, which is never freed.
    const char *report = nullptr;
    /// True if a report or sums are requested, so that small copies are counted too.
    bool counts_all = false;
    /// True for `MPGPU_VERIFY=bytes`: each accelerated copy is verified.
    bool verify = false;
};

/// Settings as read when the library was loaded.
const settings &asked();

/// Size from which copies are examined; smaller ones are passed through immediately. 0 if a report is requested, so
/// that it counts all copies, and the maximum if the interposer is off.
extern std::atomic<std::size_t> looked_at_from;

} // namespace mpgpu_preload
