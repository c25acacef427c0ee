// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_CONTEXT_HPP
#define MPGPU_CONTEXT_HPP

/// @file
/// Contexts, which hold the description of the machine and the library's resources on it.

#include <mpgpu/detail/handle.hpp>
#include <mpgpu/detail/host_task.hpp>
#include <mpgpu/detail/text.hpp>
#include <mpgpu/device.hpp>
#include <mpgpu/error.hpp>
#include <mpgpu/signal.hpp>
#include <mpgpu/span.hpp>
#include <mpgpu/stream_view.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace mpgpu {

class event;

/// Returns the version of the library at run time, in the format of `MP_VERSION`, which is the version of the header.
[[nodiscard]] inline std::uint32_t version() noexcept {
    return mp_version();
}

/// Execution backend of a context.
enum class backend : std::int32_t {
    automatic = MP_BACKEND_AUTO, ///< CUDA if a driver is found, otherwise the host backend
    host = MP_BACKEND_HOST,      ///< virtual devices on CPU threads
    cuda = MP_BACKEND_CUDA       ///< NVIDIA GPUs
};

/// Method by which streams wait for signals.
enum class signal_wait : std::int32_t {
    automatic = MP_SIGNAL_WAIT_DEFAULT,   ///< value of `MPGPU_SIGNAL_WAIT`; if unset, see `mp_signal_wait_t`
    operation = MP_SIGNAL_WAIT_OPERATION, ///< stream operation, which uses no GPU resources
    kernel = MP_SIGNAL_WAIT_KERNEL        ///< kernel of one warp, which continues sooner; see `mp_signal_wait_t`
};

/// Format of a description.
enum class description : std::int32_t {
    text = MP_FORMAT_TEXT, ///< lines of text for people
    json = MP_FORMAT_JSON  ///< one JSON object
};

/// Options of a new context. If a field keeps its default, its value is taken from the environment, otherwise from the
/// library's defaults.
struct context_options {
    /// Execution backend.
    mpgpu::backend backend = mpgpu::backend::automatic;
    /// Name of a topology preset, or path of a topology file. If it is empty, the value of `MPGPU_TOPOLOGY` is used; if
    /// that is unset, the context discovers the machine.
    std::string topology;
    /// Maximum staging memory on each device, bytes. 0: the library decides.
    std::uint64_t staging_bytes = 0;
    /// Maximum number of cached plans. 0: the library decides.
    std::uint64_t cache_plans = 0;
    /// Method by which streams wait for signals.
    mpgpu::signal_wait signal_wait = mpgpu::signal_wait::automatic;
    /// Maximum number of CPU threads that copy between pageable and pinned host memory, at most 256. -1: none. 0: the
    /// library decides.
    std::int32_t host_threads = 0;
    /// Maximum number of copy programs (compiled plans) whose CUDA graphs are cached for reuse. 0: the library decides.
    std::uint64_t cache_graphs = 0;
};

/// Options of a probe.
struct probe_options {
    /// Path of the file to write. Empty: a file in the user's cache directory. Contexts on these GPUs read it there,
    /// with the tuning file in the same directory.
    std::string file;
    /// True if the probe writes a file.
    bool keep = true;
    /// True for fewer and shorter measurements without tuning.
    bool quick = false;
};

/// Counters of a context since it was created. The C struct.
using context_statistics = mp_statistics_t;
/// Resources of a context on one device. The C struct.
using device_statistics = mp_device_statistics_t;

/// Context: a machine and all resources that the library holds on it. Usually one per process; all threads may use it.
///
/// Owns its C handle and is move-only. The destructor waits for the work enqueued in this context, then frees its
/// resources, including all of its memory. Other objects made from the context become invalid.
class context {
  public:
    /// Creates a context: discovers the machine and reads the environment. No other function does either. Allocates no
    /// device memory; the first plan that uses a device allocates it. Throws `configuration_error`, `not_supported`,
    /// `argument_error`, `driver_error`.
    explicit context(const context_options &options = {}, on_error failed = {}) {
        mp_context_options_t c = MP_CONTEXT_OPTIONS_INIT;
        c.backend = static_cast<mp_backend_t>(options.backend);
        c.topology = options.topology.empty() ? nullptr : options.topology.c_str();
        c.staging_bytes = options.staging_bytes;
        c.cache_plans = options.cache_plans;
        c.signal_wait = static_cast<mp_signal_wait_t>(options.signal_wait);
        c.host_threads = options.host_threads;
        c.cache_graphs = options.cache_graphs;
        failed.report(mp_context_create(&c, handle_.address())); // inline in the C header: passes that header's version
    }

    /// Returns the backend of the context, `host` or `cuda`. Throws `argument_error` if the context is empty.
    [[nodiscard]] mpgpu::backend backend(on_error failed = {}) const {
        mp_backend_t kind = MP_BACKEND_AUTO;
        failed.report(mp_context_get_info(get(), &kind, nullptr, nullptr));
        return static_cast<mpgpu::backend>(kind);
    }

    /// Returns true if `stream` is being captured into a graph, so that enqueued work runs at every launch. Throws
    /// `argument_error`.
    [[nodiscard]] bool is_capturing(stream_view stream, on_error failed = {}) const {
        std::int32_t capturing = 0;
        failed.report(mp_stream_get_info(get(), stream.get(), nullptr, &capturing));
        return capturing != 0;
    }

    /// Returns the number of devices. Throws `argument_error` if the context is empty.
    [[nodiscard]] device_count devices(on_error failed = {}) const {
        std::int32_t gpus = 0;
        std::int32_t host_domains = 0;
        failed.report(mp_context_get_info(get(), nullptr, &gpus, &host_domains));
        return {gpus, host_domains};
    }

    /// Describes the machine as the library sees it: devices, links, resources. Throws `argument_error` if the context
    /// is empty.
    [[nodiscard]] std::string describe(description form = description::text, on_error failed = {}) const {
        return detail::text_of(failed, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_context_describe(get(), static_cast<mp_format_t>(form), out, capacity, length);
        });
    }

    /// Measures the machine: the speed of copies, and which copies slow each other down. It also checks that copies
    /// arrive correctly. Contexts that are created later use the result; this context does not. A probe with default
    /// options also tunes plans for copies of host memory and for all-to-alls; see `mp_context_probe`. Takes seconds
    /// and uses memory on every device and all links, so no other work should run. Throws `argument_error`,
    /// `out_of_memory`, `not_supported`, `configuration_error`, `driver_error`.
    void probe(const probe_options &options = {}, on_error failed = {}) const {
        mp_probe_options_t c = MP_PROBE_OPTIONS_INIT;
        c.file = options.file.empty() ? nullptr : options.file.c_str();
        c.keep = options.keep ? MP_ON : MP_OFF;
        c.quick = options.quick ? MP_ON : MP_OFF;
        failed.report(mp_context_probe(get(), &c));
    }

    /// Returns the topology file of the last `probe`. Throws `configuration_error` if the context has not been probed.
    [[nodiscard]] std::string probed(on_error failed = {}) const {
        return detail::text_of(failed, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_context_probed(get(), out, capacity, length);
        });
    }

    /// Returns counters since the context was created. Throws `argument_error` if the context is empty.
    [[nodiscard]] context_statistics statistics(on_error failed = {}) const {
        context_statistics counts = MP_STATISTICS_INIT;
        failed.report(mp_context_statistics(get(), &counts));
        return counts;
    }

    /// Returns the resources that the context currently holds on a device. Throws `argument_error` if there is no such
    /// device.
    [[nodiscard]] device_statistics statistics(device where, on_error failed = {}) const {
        device_statistics held = MP_DEVICE_STATISTICS_INIT;
        failed.report(mp_context_device_statistics(get(), where.id(), &held));
        return held;
    }

    /// Blocks the calling thread until all work enqueued so far in a stream has finished. Use it for streams that are
    /// not an `mpgpu::stream`. Throws the exceptions of `stream::synchronize`.
    void synchronize(stream_view stream, on_error failed = {}) const {
        failed.report(mp_stream_synchronize(get(), stream.get()));
    }

    /// Blocks the calling thread until a counter in host memory that this context has allocated has reached its value,
    /// but at most `seconds`; with 0 it checks once. Throws `timeout`, `argument_error`, and `peer_gone` if a process
    /// that could have set the counter has exited.
    void synchronize(const signal_value &signal, double seconds, on_error failed = {}) const {
        failed.report(mp_signal_synchronize(get(), signal.counter, signal.value, seconds));
    }

    /// Returns true if a counter in host memory that this context has allocated has reached its value, without waiting.
    /// Throws `peer_gone` and `argument_error` as `synchronize` does.
    [[nodiscard]] bool is_reached(const signal_value &signal, on_error failed = {}) const {
        std::int32_t reached = 0;
        failed.report(mp_signal_test(get(), signal.counter, signal.value, &reached));
        return reached != 0;
    }

    /// Returns the value of a counter. Data that was written before the counter was set to this value is then visible
    /// to the calling thread. Throws the exceptions of `raise_from_host`.
    [[nodiscard]] std::uint64_t read_counter(const std::uint64_t *counter, on_error failed = {}) const {
        std::uint64_t value = 0;
        failed.report(mp_signal_read(get(), counter, &value));
        return value;
    }

    /// Sets a counter to the value of `signal` now, from the calling thread; `raise` does so in stream order. A process
    /// that sees the value also sees everything that this thread has written. Throws `argument_error`, `not_supported`
    /// for memory that the CPU cannot access, `peer_gone` if the owner of the memory has exited or freed it.
    void raise_from_host(const signal_value &signal, on_error failed = {}) const {
        failed.report(mp_signal_raise(get(), signal.counter, signal.value));
    }

    /// Enqueues a call of `task()` on a CPU thread, in the order of a stream that is not an `mpgpu::stream`. See
    /// `stream::launch_host`.
    template <class Task> void launch_host(stream_view stream, Task &&task, on_error failed = {}) const {
        failed.report(detail::launch_host(get(), stream.get(), std::forward<Task>(task)));
    }

    /// Makes work enqueued from now on in a stream that is not an `mpgpu::stream` wait for the work recorded in `ev`.
    /// Does not block. See `stream::wait`.
    inline void wait(stream_view stream, const event &ev, on_error failed = {}) const;

    /// Makes work enqueued from now on in `stream` wait until the counters of all signals have reached their values.
    /// Data that was written before they were set is visible to that work. Does not block. The counters must be in
    /// memory that this context has allocated. Throws `argument_error`, `not_supported` for imported memory,
    /// `peer_gone` if a process that was to set a counter has exited, `driver_error`.
    void wait(stream_view stream, array_view<const signal_value> signals, on_error failed = {}) const {
        failed.report(mp_stream_wait_signals(get(), stream.get(), signals.data(), signals.size()));
    }

    /// Sets the counters of all signals after all work enqueued in `stream` so far. Does not block. Throws
    /// `argument_error`, `peer_gone` if the owner of a counter's memory has exited or freed it, `driver_error`.
    void raise(stream_view stream, array_view<const signal_value> signals, on_error failed = {}) const {
        failed.report(mp_stream_raise_signals(get(), stream.get(), signals.data(), signals.size()));
    }

    /// Returns the C handle, which this object still owns.
    [[nodiscard]] mp_context_t get() const noexcept { return handle_.get(); }
    /// True if this object owns a context.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    detail::handle<mp_context_t, detail::destroyed_by<mp_context_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_CONTEXT_HPP
