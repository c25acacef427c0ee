// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_PLAN_HPP
#define MPGPU_PLAN_HPP

/// @file
/// Plans: prepared batches of transfers that can be executed many times.

#include <mpgpu/context.hpp>
#include <mpgpu/request.hpp>
#include <mpgpu/transfer.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace mpgpu {

/// Mechanism by which a plan is executed.
enum class engine : std::int32_t {
    automatic = MP_ENGINE_AUTO, ///< engine with the shortest predicted time
    stream = MP_ENGINE_STREAM,  ///< copies on several internal streams, ordered by events
    graph = MP_ENGINE_GRAPH,    ///< copies and fused copy kernels, launched as one CUDA graph
    batch = MP_ENGINE_BATCH,    ///< direct copies without staging, submitted by batched driver calls
    kernel = MP_ENGINE_KERNEL   ///< direct copies without staging, performed by fused copy kernels
};

/// Options for creating a plan. For a field that keeps its default value, the library uses, in this order: the
/// environment variable of the option, the tuning file, and its performance model.
struct plan_options {
    /// Mechanism by which the plan is executed.
    mpgpu::engine engine = mpgpu::engine::automatic;
    /// Maximum number of paths over which one transfer is distributed. 0: the library decides.
    std::uint32_t max_paths = 0;
    /// True (the default) if copies between GPUs may use a path through host memory.
    std::optional<bool> host_path;
    /// Chunk size on paths with staging buffers (through another GPU or host memory), bytes. 0: the library decides.
    std::uint64_t chunk_bytes = 0;
    /// Transfer size below which a transfer uses only one path, bytes. 0: the library decides.
    std::uint64_t min_bytes = 0;
    /// Maximum size of the plan's staging buffers on each device, bytes. 0: the limit of the context.
    std::uint64_t staging_bytes = 0;
    /// Bit mask of the GPUs through which the data of other GPUs may be forwarded. Bit `g` represents GPU `g`.
    /// `MP_RELAY_NONE` allows no GPU. 0 allows all.
    std::uint64_t relay_gpus = 0;
    /// True (the default) if executions measure variants of the plan and then use the fastest. In a plan of a `node`,
    /// all ranks use the same variant in each execution. If its transfers are divided into partitions, this option has
    /// an effect only with `agent::automatic` and without `partitioning::arrivals`.
    std::optional<bool> adapt;
    /// Number of chunks on each path through another GPU. Overrides `chunk_bytes`. 0: the library decides.
    std::uint32_t relay_chunks = 0;
    /// Number of chunks on each path through host memory. Overrides `chunk_bytes`. 0: the library decides.
    std::uint32_t host_chunks = 0;
};

namespace detail {

/// Converts an optional switch to the value of the C API.
[[nodiscard]] inline mp_switch_t c_switch(std::optional<bool> on) noexcept {
    return on ? (*on ? MP_ON : MP_OFF) : MP_DEFAULT;
}

/// Converts plan options to the struct of the C API.
[[nodiscard]] inline mp_plan_options_t c_options(const plan_options &options) noexcept {
    mp_plan_options_t c = MP_PLAN_OPTIONS_INIT;
    c.engine = static_cast<mp_engine_t>(options.engine);
    c.max_paths = options.max_paths;
    c.relay_gpus = options.relay_gpus;
    c.host_path = c_switch(options.host_path);
    c.adapt = c_switch(options.adapt);
    c.chunk_bytes = options.chunk_bytes;
    c.relay_chunks = options.relay_chunks;
    c.host_chunks = options.host_chunks;
    c.min_bytes = options.min_bytes;
    c.staging_bytes = options.staging_bytes;
    return c;
}

} // namespace detail

/// Properties of a plan: size and number of paths of its transfers, predicted time and, if available, measured time. An
/// alias of the C struct.
using plan_info = mp_plan_info_t;

/// Plan: a prepared batch of transfers. It is created once and executed any number of times, from any thread.
///
/// Owns its C handle and is move-only. The destructor does not block; executions that are already enqueued still
/// finish. The destructor of a plan that a `node` created blocks until the executions that this rank has enqueued have
/// finished. These executions finish only if the other ranks execute the same steps.
class plan {
  public:
    /// Constructs an empty plan. Every function called on it reports `status::invalid_handle`.
    plan() noexcept = default;

    /// Plans a batch of transfers together, so that they do not compete for links. The transfers run in no particular
    /// order. No destination may overlap another destination or a source. The memory of the transfers must stay
    /// allocated as long as the plan is executed. The array `transfers` is read during the call only. Throws
    /// `argument_error`, `not_supported`, `out_of_memory`.
    plan(const context &ctx, array_view<const transfer> transfers, const plan_options &options = {},
         on_error failed = {}) {
        const mp_plan_options_t c = detail::c_options(options);
        failed.report(mp_plan(ctx.get(), transfers.data(), transfers.size(), &c, handle_.address()));
    }

    /// Performs the one-time setup for executions in `stream`, so that the first execution takes no longer than later
    /// ones. Enqueues nothing. It may take milliseconds and may block until work on the GPUs has finished, so call it
    /// before a time loop. See `mp_plan_prepare`. Throws the exceptions of `execute`.
    void prepare(stream_view stream, on_error failed = {}) const {
        failed.report(mp_plan_prepare(get(), stream.get()));
    }

    /// Enqueues one execution of the plan, after all earlier work in `stream` and before all later work. Does not wait
    /// for the device. Returns a request for the end of the execution. A plan may be executed concurrently in several
    /// streams; the caller must order executions that write to the same destination. Throws `argument_error`,
    /// `out_of_memory`, `driver_error`.
    [[nodiscard]] request execute(stream_view stream, on_error failed = {}) const {
        request done;
        failed.report(mp_execute(get(), stream.get(), done.handle_.address()));
        return done;
    }

    /// Enqueues one execution of the plan without creating a request, for programs that use only streams for ordering.
    /// Throws the exceptions of `execute`.
    void enqueue(stream_view stream, on_error failed = {}) const {
        failed.report(mp_execute(get(), stream.get(), nullptr));
    }

    /// Begins a step (one execution) of a plan with partitions, after all earlier work in `stream`. Does not block.
    /// Next, enqueue the kernels that produce the data, and then call `enqueue` or `execute`. See `mp_plan_arm`. Throws
    /// `argument_error`, `peer_gone`.
    void arm(stream_view stream, on_error failed = {}) const { failed.report(mp_plan_arm(get(), stream.get())); }

    /// Returns the trigger of a transfer with partitions: a kernel argument with which kernels mark partitions ready or
    /// detect their arrival (mpgpu/trigger.cuh). `index` is the index, from 0, in the list of transfers that rank
    /// `rank` passed. Throws `argument_error`.
    [[nodiscard]] mp_trigger_t trigger(std::uint32_t rank, std::size_t index, on_error failed = {}) const {
        mp_trigger_t made = MP_TRIGGER_INIT;
        failed.report(mp_plan_get_trigger(get(), rank, index, &made));
        return made;
    }

    /// Blocks until the last enqueued step of a plan with partitions has finished on this rank, but at most `seconds`
    /// seconds. The text of a `timeout` error lists the partitions that are not ready. Throws `timeout`, `peer_gone`,
    /// `argument_error`.
    void synchronize(double seconds, on_error failed = {}) const { failed.report(mp_plan_synchronize(get(), seconds)); }

    /// Returns a description of the plan as text or JSON: the paths, the size of the data and of the chunks on each
    /// path, the predicted time, and why other paths were rejected. Throws `argument_error` if the plan is empty.
    [[nodiscard]] std::string describe(description form = description::text, on_error failed = {}) const {
        return detail::text_of(failed, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_plan_describe(get(), static_cast<mp_format_t>(form), out, capacity, length);
        });
    }

    /// Returns properties of the plan, for example its predicted time. Throws `argument_error` if the plan is empty.
    [[nodiscard]] plan_info info(on_error failed = {}) const {
        plan_info numbers = MP_PLAN_INFO_INIT;
        failed.report(mp_plan_get_info(get(), &numbers));
        return numbers;
    }

    /// Returns the C handle, which this object continues to own.
    [[nodiscard]] mp_plan_t get() const noexcept { return handle_.get(); }
    /// Returns true if this object owns a plan.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    friend class node;
    detail::handle<mp_plan_t, detail::destroyed_by<mp_plan_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_PLAN_HPP
