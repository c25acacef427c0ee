// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_CONTEXT_HPP
#define MPGPU_CONTEXT_HPP

/// @file
/// Contexts: the library's state for one process, with its backend, topology, plan cache and memory.

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

/// Returns the version of the library that is loaded at run time, in the format of `MP_VERSION`. `MP_VERSION` itself is
/// the version of the header.
[[nodiscard]] inline std::uint32_t version() noexcept {
    return mp_version();
}

/// Execution backend of a context.
enum class backend : std::int32_t {
    automatic = MP_BACKEND_AUTO, ///< CUDA if a driver is found, otherwise the host backend
    host = MP_BACKEND_HOST,      ///< virtual devices, implemented by CPU threads
    cuda = MP_BACKEND_CUDA       ///< NVIDIA GPUs
};

/// Method by which streams wait for signals.
enum class signal_wait : std::int32_t {
    automatic = MP_SIGNAL_WAIT_DEFAULT,   ///< value of `MPGPU_SIGNAL_WAIT`; if unset, see `mp_signal_wait_t`
    operation = MP_SIGNAL_WAIT_OPERATION, ///< stream memory operation, which occupies no multiprocessor
    kernel = MP_SIGNAL_WAIT_KERNEL        ///< kernel of one warp, which reacts sooner; see `mp_signal_wait_t`
};

/// Output format of the functions that describe an object.
enum class description : std::int32_t {
    text = MP_FORMAT_TEXT, ///< readable text
    json = MP_FORMAT_JSON  ///< one JSON object
};

/// Options for creating a context. For a field that keeps its default value, the library uses the environment variable
/// of the option and, if it is not set, its own default.
struct context_options {
    /// Execution backend of the context.
    mpgpu::backend backend = mpgpu::backend::automatic;
    /// Topology of the machine: name of a built-in preset or path of a topology file. If it is empty, the library uses
    /// the value of `MPGPU_TOPOLOGY` and, if that is not set, detects the topology.
    std::string topology;
    /// Maximum size of the staging buffers on each device, bytes. 0: the library decides.
    std::uint64_t staging_bytes = 0;
    /// Maximum number of plans in the plan cache. 0: the library decides.
    std::uint64_t cache_plans = 0;
    /// Method by which streams wait for signals.
    mpgpu::signal_wait signal_wait = mpgpu::signal_wait::automatic;
    /// Maximum number of CPU threads that copy between pageable and pinned host memory, at most 256. -1: none. 0: the
    /// library decides.
    std::int32_t host_threads = 0;
    /// Maximum number of plans whose CUDA graphs the context keeps. Plans that differ only in their addresses count
    /// once. 0: the library decides.
    std::uint64_t cache_graphs = 0;
};

/// Options of `context::probe`, which measures the machine.
struct probe_options {
    /// Path of the topology file to which the measurements are written. If it is empty, a file in the user's cache
    /// directory is used. Contexts that are created later on the same GPUs find that file, and the tuning file next to
    /// it, automatically.
    std::string file;
    /// True if the measurements are written to the topology file `file`.
    bool keep = true;
    /// True for fewer and shorter measurements without tuning.
    bool quick = false;
};

/// Statistics of a context since its creation. An alias of the C struct.
using context_statistics = mp_statistics_t;
/// Resources that a context holds on one device. An alias of the C struct.
using device_statistics = mp_device_statistics_t;

/// Context: the library's state for one process. It contains the backend, topology, plan cache, streams and memory.
/// Usually a process creates one context, which all threads may use.
///
/// Owns its C handle and is move-only. The destructor blocks until the work that is enqueued in this context has
/// finished. It then frees all resources of the context, including memory. Other objects that were created with the
/// context become invalid.
class context {
  public:
    /// Creates a context: chooses the backend, reads the topology, and reads the environment variables. No other
    /// function reads environment variables. Allocates no device memory; the first plan that uses a device does. Throws
    /// `configuration_error`, `not_supported`, `argument_error`, `driver_error`.
    explicit context(const context_options &options = {}, on_error failed = {}) {
        mp_context_options_t c = MP_CONTEXT_OPTIONS_INIT;
        c.backend = static_cast<mp_backend_t>(options.backend);
        c.topology = options.topology.empty() ? nullptr : options.topology.c_str();
        c.staging_bytes = options.staging_bytes;
        c.cache_plans = options.cache_plans;
        c.signal_wait = static_cast<mp_signal_wait_t>(options.signal_wait);
        c.host_threads = options.host_threads;
        c.cache_graphs = options.cache_graphs;
        failed.report(mp_context_create(&c, handle_.address())); // passes the version of the C header
    }

    /// Returns an object that refers to the context `existing`, for libraries that receive contexts from C or Fortran
    /// programs. The object does not own the context, and its destructor does not destroy it. The context must outlive
    /// the object.
    [[nodiscard]] static context borrow(mp_context_t existing) noexcept {
        return context(detail::handle<mp_context_t, owner>(existing, owner{false}));
    }

    /// Returns the backend of the context, `host` or `cuda`. Throws `argument_error` if the context is empty.
    [[nodiscard]] mpgpu::backend backend(on_error failed = {}) const {
        mp_backend_t kind = MP_BACKEND_AUTO;
        failed.report(mp_context_get_info(get(), &kind, nullptr, nullptr));
        return static_cast<mpgpu::backend>(kind);
    }

    /// Returns true if `stream` is being captured into a graph. Work that is enqueued in it then runs at every launch
    /// of the graph. Throws `argument_error`.
    [[nodiscard]] bool is_capturing(stream_view stream, on_error failed = {}) const {
        std::int32_t capturing = 0;
        failed.report(mp_stream_get_info(get(), stream.get(), nullptr, &capturing));
        return capturing != 0;
    }

    /// Returns the numbers of GPUs and host NUMA domains. Throws `argument_error` if the context is empty.
    [[nodiscard]] device_count devices(on_error failed = {}) const {
        std::int32_t gpus = 0;
        std::int32_t host_domains = 0;
        failed.report(mp_context_get_info(get(), nullptr, &gpus, &host_domains));
        return {gpus, host_domains};
    }

    /// Returns a description of the context: version, backend, topology and settings. Throws `argument_error` if the
    /// context is empty.
    [[nodiscard]] std::string describe(description form = description::text, on_error failed = {}) const {
        return detail::text_of(failed, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_context_describe(get(), static_cast<mp_format_t>(form), out, capacity, length);
        });
    }

    /// Probes (measures) the machine: the speed of copies, which copies slow each other down, and whether data arrive
    /// intact. Contexts that are created later use the measurements. This context does not. With default options the
    /// probe also tunes plans for copies of host memory and for all-to-all operations; see `mp_context_probe`.
    ///
    /// Blocks for seconds. Uses memory on every device and all links, so no other work should run. Throws
    /// `argument_error`, `out_of_memory`, `not_supported`, `configuration_error`, `driver_error`.
    void probe(const probe_options &options = {}, on_error failed = {}) const {
        mp_probe_options_t c = MP_PROBE_OPTIONS_INIT;
        c.file = options.file.empty() ? nullptr : options.file.c_str();
        c.keep = options.keep ? MP_ON : MP_OFF;
        c.quick = options.quick ? MP_ON : MP_OFF;
        failed.report(mp_context_probe(get(), &c));
    }

    /// Returns the topology file that the last `probe` of this context produced, as TOML text. Throws
    /// `configuration_error` if the context has not been probed.
    [[nodiscard]] std::string probed(on_error failed = {}) const {
        return detail::text_of(failed, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_context_probed(get(), out, capacity, length);
        });
    }

    /// Returns the statistics of the context since its creation. Throws `argument_error` if the context is empty.
    [[nodiscard]] context_statistics statistics(on_error failed = {}) const {
        context_statistics counts = MP_STATISTICS_INIT;
        failed.report(mp_context_statistics(get(), &counts));
        return counts;
    }

    /// Returns the resources that the context holds on a device now. Throws `argument_error` if the device does not
    /// exist.
    [[nodiscard]] device_statistics statistics(device where, on_error failed = {}) const {
        device_statistics held = MP_DEVICE_STATISTICS_INIT;
        failed.report(mp_context_device_statistics(get(), where.id(), &held));
        return held;
    }

    /// Blocks the calling thread until all work that is enqueued in `stream` so far has finished. Use it for streams
    /// that are not an `mpgpu::stream`. Throws the exceptions of `stream::synchronize`.
    void synchronize(stream_view stream, on_error failed = {}) const {
        failed.report(mp_stream_synchronize(get(), stream.get()));
    }

    /// Blocks the calling thread until the counter of `signal` is at least `signal.value`, but for at most `seconds`
    /// seconds. With 0 seconds it checks once. The counter must be in host memory that this context has allocated.
    /// Throws `timeout`, `argument_error`. Throws `peer_gone` if a process that could have set the counter has exited.
    void synchronize(const signal_value &signal, double seconds, on_error failed = {}) const {
        failed.report(mp_signal_synchronize(get(), signal.counter, signal.value, seconds));
    }

    /// Returns true if the counter of `signal` is at least `signal.value`. Does not block. The counter must be in host
    /// memory that this context has allocated. Throws `argument_error` and `peer_gone` in the cases in which
    /// `synchronize` throws them.
    [[nodiscard]] bool is_reached(const signal_value &signal, on_error failed = {}) const {
        std::int32_t reached = 0;
        failed.report(mp_signal_test(get(), signal.counter, signal.value, &reached));
        return reached != 0;
    }

    /// Returns the current value of the counter at the address `counter`. The calling thread then sees all data that
    /// were written before the counter was set to the returned value. Throws the exceptions of `raise_from_host`.
    [[nodiscard]] std::uint64_t read_counter(const std::uint64_t *counter, on_error failed = {}) const {
        std::uint64_t value = 0;
        failed.report(mp_signal_read(get(), counter, &value));
        return value;
    }

    /// Sets the counter of `signal` to `signal.value` immediately, from the calling thread. `raise` sets counters in
    /// stream order instead. A process that sees the new value also sees all data that this thread has written. Throws
    /// `argument_error`. Throws `not_supported` for memory that the CPU cannot access, and `peer_gone` if the owner of
    /// the memory has exited or has freed it.
    void raise_from_host(const signal_value &signal, on_error failed = {}) const {
        failed.report(mp_signal_raise(get(), signal.counter, signal.value));
    }

    /// Enqueues a call of `task()` on a CPU thread, in stream order: after all earlier work in `stream` and before all
    /// later work. `stream` need not be an `mpgpu::stream`. See `stream::launch_host`.
    template <class Task> void launch_host(stream_view stream, Task &&task, on_error failed = {}) const {
        failed.report(detail::launch_host(get(), stream.get(), std::forward<Task>(task)));
    }

    /// Makes all work that is enqueued in `stream` from now on wait for the work that is recorded in `ev` now. `stream`
    /// need not be an `mpgpu::stream`. Does not block. Throws the exceptions of `stream::wait`.
    inline void wait(stream_view stream, const event &ev, on_error failed = {}) const;

    /// Makes all work that is enqueued in `stream` from now on wait until the counter of each signal `s` in `signals`
    /// is at least `s.value`. That work sees all data that were written before the counters were set. Does not block.
    /// The counters must be in memory that this context has allocated. See `mp_stream_wait_signals`.
    ///
    /// Throws `argument_error`, `driver_error`. Throws `not_supported` for imported memory, and `peer_gone` if a
    /// process that could have set a counter has exited.
    void wait(stream_view stream, array_view<const signal_value> signals, on_error failed = {}) const {
        failed.report(mp_stream_wait_signals(get(), stream.get(), signals.data(), signals.size()));
    }

    /// Sets the counter of each signal `s` in `signals` to `s.value`, after all work that is enqueued in `stream` so
    /// far. Does not block. Throws `argument_error`, `driver_error`. Throws `peer_gone` if the owner of a counter's
    /// memory has exited or has freed it.
    void raise(stream_view stream, array_view<const signal_value> signals, on_error failed = {}) const {
        failed.report(mp_stream_raise_signals(get(), stream.get(), signals.data(), signals.size()));
    }

    /// Returns the C handle. The ownership of the context does not change.
    [[nodiscard]] mp_context_t get() const noexcept { return handle_.get(); }
    /// Returns true if this object owns a context or refers to one.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    /// Deleter of the context. Does nothing if `is_owner` is false, as in objects that `borrow` returns.
    struct owner {
        bool is_owner = true;
        void operator()(mp_context_t value) const noexcept {
            if (is_owner) {
                static_cast<void>(mp_context_destroy(value));
            }
        }
    };

    explicit context(detail::handle<mp_context_t, owner> handle) noexcept : handle_(std::move(handle)) {}

    detail::handle<mp_context_t, owner> handle_;
};

} // namespace mpgpu

#endif // MPGPU_CONTEXT_HPP
