// Reads the interposer's environment variables, which docs/reference/environment.md describes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace mpgpu_preload {

constexpr std::uint64_t every_gpu = UINT64_MAX;

struct settings {
    /// True if copies may be accelerated (`MPGPU_PRELOAD`).
    bool on = true;
    /// Size in bytes below which copies are passed to the driver (`MPGPU_PRELOAD_MIN_BYTES`).
    std::size_t min_bytes = std::size_t{1} << 20;
    /// Bit mask of the GPUs that mpgpu may use (`MPGPU_PRELOAD_GPUS`). Without a value, mpgpu may use the GPUs that the
    /// program uses.
    std::optional<std::uint64_t> gpus;
    /// True if `MPGPU_RELAY_GPUS` is set. Only the presence is recorded, because the library reads the value itself.
    bool names_relays = false;
    /// Destination of the report (`MPGPU_PRELOAD_REPORT`): `stderr`, a path, or null for no report. The text is a copy
    /// that is never freed.
    const char *report = nullptr;
    /// True if a report or shared counters are requested. Small copies are then counted too.
    bool counts_all = false;
    /// True if the data of each accelerated copy is compared with the source (`MPGPU_VERIFY=bytes`).
    bool verify = false;
};

/// Returns the settings as read from the environment when the library was loaded.
const settings &asked();

/// Size in bytes from which copies are examined. Smaller copies are passed to the driver immediately. The value is 0 if
/// all copies must be counted for a report, and the maximum if the interposer is off.
extern std::atomic<std::size_t> looked_at_from;

} // namespace mpgpu_preload
