// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_CONTEXT_HPP
#define MPGPU_CONTEXT_HPP

/// @file
/// Contexts: a machine, and all that the library holds on it.

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

/// The version of the library at run time, as `MP_VERSION` counts; the header's own is `MP_VERSION`.
[[nodiscard]] inline std::uint32_t version() noexcept {
    return mp_version();
}

/// Where bytes move.
enum class backend : std::int32_t {
    automatic = MP_BACKEND_AUTO, ///< CUDA where a driver is found, else the host backend
    host = MP_BACKEND_HOST,      ///< virtual devices on CPU threads
    cuda = MP_BACKEND_CUDA       ///< NVIDIA GPUs
};

/// How streams wait for signals.
enum class signal_wait : std::int32_t {
    automatic = MP_SIGNAL_WAIT_DEFAULT,   ///< as `MPGPU_SIGNAL_WAIT` says; `mp_signal_wait_t` has the rest
    operation = MP_SIGNAL_WAIT_OPERATION, ///< by an operation of the stream, which takes nothing of the GPU
    kernel = MP_SIGNAL_WAIT_KERNEL ///< by a kernel of one warp, which goes on sooner; `mp_signal_wait_t` says more
};

/// Form of a description.
enum class description : std::int32_t {
    text = MP_FORMAT_TEXT, ///< lines for people
    json = MP_FORMAT_JSON  ///< one JSON object
};

/// How to set up a context. A field left alone is decided by the environment, then by the library.
struct context_options {
    /// Where bytes move.
    mpgpu::backend backend = mpgpu::backend::automatic;
    /// Name of a preset, or path of a topology file; empty: the machine is discovered.
    std::string topology;
    /// The most staging memory on each device, bytes; 0: left to the library.
    std::uint64_t staging_bytes = 0;
    /// How many plans are kept for reuse; 0: left to the library.
    std::uint64_t cache_plans = 0;
    /// How streams wait for signals.
    mpgpu::signal_wait signal_wait = mpgpu::signal_wait::automatic;
    /// CPU threads that may copy between ordinary and pinned host memory, at most 256; -1: none; 0: left to the
    /// library.
    std::int32_t host_threads = 0;
    /// How many programs' graphs are kept for reuse; 0: left to the library.
    std::uint64_t cache_graphs = 0;
};

/// How to probe a machine.
struct probe_options {
    /// The file to write; empty: one in the user's cache directory, where contexts on these GPUs find it, and beside it
    /// what was tuned for it.
    std::string file;
    /// Whether to write a file.
    bool keep = true;
    /// Fewer and shorter measurements, for a first look. Nothing is tuned.
    bool quick = false;
};

/// What a context has done. The C struct.
using context_statistics = mp_statistics_t;
/// What a context holds on one device. The C struct.
using device_statistics = mp_device_statistics_t;

/// A machine and everything that the library holds on it. One per process is the rule; it may be used from all threads.
///
/// Owns it, and is move-only. Its destructor waits for the work of this context, then frees what it holds, all its
/// memory included; its other objects become invalid.
class context {
  public:
    /// Finds the machine and reads the environment, here and only here. Allocates nothing on a device: that waits for
    /// the first plan that uses it. Throws `configuration_error`, `not_supported`, `argument_error`, `driver_error`.
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

    /// What it runs on: `host` or `cuda`. Throws `argument_error` when this is empty.
    [[nodiscard]] mpgpu::backend backend(on_error failed = {}) const {
        mp_backend_t kind = MP_BACKEND_AUTO;
        failed.report(mp_context_get_info(get(), &kind, nullptr, nullptr));
        return static_cast<mpgpu::backend>(kind);
    }

    /// Whether `stream` is being captured into a graph, so that what is enqueued in it runs at every launch. Throws
    /// `argument_error`.
    [[nodiscard]] bool is_capturing(stream_view stream, on_error failed = {}) const {
        std::int32_t capturing = 0;
        failed.report(mp_stream_get_info(get(), stream.get(), nullptr, &capturing));
        return capturing != 0;
    }

    /// How many devices there are. Throws `argument_error` when this is empty.
    [[nodiscard]] device_count devices(on_error failed = {}) const {
        std::int32_t gpus = 0;
        std::int32_t host_domains = 0;
        failed.report(mp_context_get_info(get(), nullptr, &gpus, &host_domains));
        return {gpus, host_domains};
    }

    /// The machine as the library sees it: devices, links, resources. Throws `argument_error` when this is empty.
    [[nodiscard]] std::string describe(description form = description::text, on_error failed = {}) const {
        return detail::text_of(failed, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_context_describe(get(), static_cast<mp_format_t>(form), out, capacity, length);
        });
    }

    /// Measures the machine: how fast copies are, which slow each other down, whether their bytes arrive. Contexts made
    /// later use the result, this one does not. A full probe that is kept for them also tunes copies of host memory and
    /// all-to-alls, see `mp_context_probe`. Takes seconds, memory on every device and all links, and must run alone.
    /// Throws `argument_error`, `out_of_memory`, `not_supported`, `configuration_error`, `driver_error`.
    void probe(const probe_options &options = {}, on_error failed = {}) const {
        mp_probe_options_t c = MP_PROBE_OPTIONS_INIT;
        c.file = options.file.empty() ? nullptr : options.file.c_str();
        c.keep = options.keep ? MP_ON : MP_OFF;
        c.quick = options.quick ? MP_ON : MP_OFF;
        failed.report(mp_context_probe(get(), &c));
    }

    /// The topology file of the last `probe`. Throws `configuration_error` when there was none.
    [[nodiscard]] std::string probed(on_error failed = {}) const {
        return detail::text_of(failed, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_context_probed(get(), out, capacity, length);
        });
    }

    /// Counts since the context was made. Throws `argument_error` when this is empty.
    [[nodiscard]] context_statistics statistics(on_error failed = {}) const {
        context_statistics counts = MP_STATISTICS_INIT;
        failed.report(mp_context_statistics(get(), &counts));
        return counts;
    }

    /// What the context holds on one device now, bytes. Throws `argument_error` when there is no such device.
    [[nodiscard]] device_statistics statistics(device where, on_error failed = {}) const {
        device_statistics held = MP_DEVICE_STATISTICS_INIT;
        failed.report(mp_context_device_statistics(get(), where.id(), &held));
        return held;
    }

    /// Blocks the calling thread until everything enqueued in a stream so far has finished. For streams that are not an
    /// `mpgpu::stream`. Throws as `stream::synchronize` does.
    void synchronize(stream_view stream, on_error failed = {}) const {
        failed.report(mp_stream_synchronize(get(), stream.get()));
    }

    /// Blocks the calling thread until a counter in host memory of this context has reached its value, at most
    /// `seconds`; with 0 it looks once. Throws `timeout`, `peer_gone` when a process that might have raised it has
    /// ended, `argument_error`.
    void synchronize(const signal_value &signal, double seconds, on_error failed = {}) const {
        failed.report(mp_signal_synchronize(get(), signal.counter, signal.value, seconds));
    }

    /// Whether a counter in host memory of this context has reached its value, without waiting; that it has not is no
    /// error. Throws `peer_gone` and `argument_error` as `synchronize` does.
    [[nodiscard]] bool is_reached(const signal_value &signal, on_error failed = {}) const {
        std::int32_t reached = 0;
        failed.report(mp_signal_test(get(), signal.counter, signal.value, &reached));
        return reached != 0;
    }

    /// What a counter stands at; what was written before it was raised to that is then visible to the calling thread.
    /// Throws as `raise_from_host`.
    [[nodiscard]] std::uint64_t read_counter(const std::uint64_t *counter, on_error failed = {}) const {
        std::uint64_t value = 0;
        failed.report(mp_signal_read(get(), counter, &value));
        return value;
    }

    /// Raises a counter to its value now, by the calling thread; `raise` does so in stream order. Whoever sees the
    /// value sees what this thread has written. Throws `argument_error`, `not_supported` for memory that the CPU does
    /// not reach, `peer_gone` when the owner of the memory has ended or freed it.
    void raise_from_host(const signal_value &signal, on_error failed = {}) const {
        failed.report(mp_signal_raise(get(), signal.counter, signal.value));
    }

    /// Enqueues a call of `task()` on a CPU thread in the order of a stream that is not an `mpgpu::stream`. See
    /// `stream::launch_host`.
    template <class Task> void launch_host(stream_view stream, Task &&task, on_error failed = {}) const {
        failed.report(detail::launch_host(get(), stream.get(), std::forward<Task>(task)));
    }

    /// Work enqueued from now on in a stream that is not an `mpgpu::stream` starts after what `ev` stands for now. Does
    /// not block. See `stream::wait`.
    inline void wait(stream_view stream, const event &ev, on_error failed = {}) const;

    /// Work enqueued from now on in `stream` starts when the counters of all signals have reached their values; it sees
    /// what was written before they were raised. Does not block. The counters lie in memory of this context. Throws
    /// `argument_error`, `not_supported` for imported memory, `peer_gone` for what a process that has ended was to
    /// raise, `driver_error`.
    void wait(stream_view stream, array_view<const signal_value> signals, on_error failed = {}) const {
        failed.report(mp_stream_wait_signals(get(), stream.get(), signals.data(), signals.size()));
    }

    /// Raises the counters of all signals after all work enqueued in `stream` so far. Does not block. Throws
    /// `argument_error`, `peer_gone` when the owner of a counter's memory has ended or freed it, `driver_error`.
    void raise(stream_view stream, array_view<const signal_value> signals, on_error failed = {}) const {
        failed.report(mp_stream_raise_signals(get(), stream.get(), signals.data(), signals.size()));
    }

    /// The C handle, still owned by this object.
    [[nodiscard]] mp_context_t get() const noexcept { return handle_.get(); }
    /// Whether this owns a context.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    detail::handle<mp_context_t, detail::destroyed_by<mp_context_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_CONTEXT_HPP
