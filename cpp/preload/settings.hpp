// What the environment asks of the interposer: docs/reference/environment.md, "Programs that are not changed".
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
    /// `MPGPU_PRELOAD_MIN_BYTES`: smaller copies pass.
    std::size_t min_bytes = std::size_t{1} << 20;
    /// `MPGPU_PRELOAD_GPUS`: a bit for each GPU that mpgpu may work with; none for those that the program uses.
    std::optional<std::uint64_t> gpus;
    /// `MPGPU_RELAY_GPUS` is set, which the library reads.
    bool names_relays = false;
    /// `MPGPU_PRELOAD_REPORT`: `stderr`, a path, or null. A copy, which is never freed.
    const char *report = nullptr;
    /// Whether anybody asks for counts, so that small copies are counted too.
    bool counts_all = false;
    /// `MPGPU_VERIFY=bytes`: what becomes of each taken copy is asked for.
    bool verify = false;
};

/// Read when the library is loaded.
const settings &asked();

/// Copies of fewer bytes go on at once. All copies are looked at where a report is asked for, so that it can count
/// them; none where the interposer is off.
extern std::atomic<std::size_t> looked_at_from;

} // namespace mpgpu_preload
