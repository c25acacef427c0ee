// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_PLAN_HPP
#define MPGPU_PLAN_HPP

/// @file
/// Plans: batches of transfers that execute together.

#include <mpgpu/context.hpp>
#include <mpgpu/request.hpp>
#include <mpgpu/transfer.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace mpgpu {

/// Mechanism that executes a plan.
enum class engine : std::int32_t {
    automatic = MP_ENGINE_AUTO, ///< engine that the model predicts to be fastest
    stream = MP_ENGINE_STREAM,  ///< copies on internal streams, ordered by events
    graph = MP_ENGINE_GRAPH,    ///< copies and fused kernels, launched as one graph
    batch = MP_ENGINE_BATCH,    ///< direct copies, in batched driver calls
    kernel = MP_ENGINE_KERNEL   ///< direct copies, in fused kernels
};

/// Options of a plan. If a field keeps its default, its value is taken from the environment, otherwise from the tuning
/// file, otherwise from the cost model.
struct plan_options {
    /// Mechanism that executes the plan.
    mpgpu::engine engine = mpgpu::engine::automatic;
    /// Maximum number of paths per transfer. 0: the model decides.
    std::uint32_t max_paths = 0;
    /// True if a copy between GPUs may also pass through host memory, which is the default.
    std::optional<bool> host_path;
    /// Size of a chunk on staged paths (paths through another GPU or host memory), bytes. 0: the model decides.
    std::uint64_t chunk_bytes = 0;
    /// Size below which a transfer uses one path only, bytes. 0: the model decides.
    std::uint64_t min_bytes = 0;
    /// Maximum staging memory on each device, bytes. 0: the context's limit.
    std::uint64_t staging_bytes = 0;
    /// Bit mask of the GPUs that may relay bytes for others: bit `g` is GPU `g`. `MP_RELAY_NONE` allows none, 0 allows
    /// all.
    std::uint64_t relay_gpus = 0;
    /// True if executions measure variants of the plan and use the fastest, which is the default. Plans made by a node
    /// do not choose among variants.
    std::optional<bool> adapt;
    /// Number of chunks of each path through another GPU. Takes precedence over `chunk_bytes`. 0: the model decides.
    std::uint32_t relay_chunks = 0;
    /// Number of chunks of each path through host memory. Takes precedence over `chunk_bytes`. 0: the model decides.
    std::uint32_t host_chunks = 0;
};

namespace detail {

/// Returns the C value of an optional switch.
[[nodiscard]] inline mp_switch_t c_switch(std::optional<bool> on) noexcept {
    return on ? (*on ? MP_ON : MP_OFF) : MP_DEFAULT;
}

/// Returns the C struct of plan options.
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

/// Properties of a plan: number of bytes, number of paths, time predicted by the model, and measured time if available.
/// The C struct.
using plan_info = mp_plan_info_t;

/// Plan for a batch of transfers. It is made once and executed any number of times, from any thread.
///
/// Owns its C handle and is move-only. The destructor does not wait; enqueued executions still finish. If a `node` made
/// the plan, the destructor blocks until the steps that this rank has enqueued have finished, which requires the other
/// ranks to reach them.
class plan {
  public:
    /// Constructs an empty plan. Every call on it reports `status::invalid_handle`.
    plan() noexcept = default;

    /// Plans the transfers of one communication step together, so that they do not compete for links. The transfers run
    /// in no particular order, so no destination may overlap another destination or a source. The memory must exist
    /// whenever the plan is executed; the array of transfers is not kept. Throws `argument_error`, `not_supported`,
    /// `out_of_memory`.
    plan(const context &ctx, array_view<const transfer> transfers, const plan_options &options = {},
         on_error failed = {}) {
        const mp_plan_options_t c = detail::c_options(options);
        failed.report(mp_plan(ctx.get(), transfers.data(), transfers.size(), &c, handle_.address()));
    }

    /// Prepares the first execution in `stream`, so that it takes no longer than later ones. Enqueues nothing. Call it
    /// before a time loop: it may take milliseconds and may wait for work on the GPUs. See `mp_plan_prepare`. Throws
    /// the exceptions of `execute`.
    void prepare(stream_view stream, on_error failed = {}) const {
        failed.report(mp_plan_prepare(get(), stream.get()));
    }

    /// Enqueues the copies after all earlier work in `stream` and before all later work. Does not wait for the device.
    /// Executions of one plan, or of plans that share staging memory, may be enqueued in different streams
    /// concurrently. Throws `argument_error`, `out_of_memory`, `driver_error`.
    [[nodiscard]] request execute(stream_view stream, on_error failed = {}) const {
        request done;
        failed.report(mp_execute(get(), stream.get(), done.handle_.address()));
        return done;
    }

    /// Enqueues the copies without creating a request, for code that is ordered by streams alone. Throws the exceptions
    /// of `execute`.
    void enqueue(stream_view stream, on_error failed = {}) const {
        failed.report(mp_execute(get(), stream.get(), nullptr));
    }

    /// Begins a step (one execution) of a plan with partitions, after all earlier work in `stream`. Next, enqueue the
    /// kernels that produce the data, then call `enqueue` or `execute`. See `mp_plan_arm`. Throws `argument_error`,
    /// `peer_gone`.
    void arm(stream_view stream, on_error failed = {}) const { failed.report(mp_plan_arm(get(), stream.get())); }

    /// Returns the trigger of a transfer that moves in partitions: the argument with which kernels mark partitions as
    /// ready or check that they have arrived (mpgpu/trigger.cuh). `index` is the index among the transfers that `rank`
    /// passed. Throws `argument_error`.
    [[nodiscard]] mp_trigger_t trigger(std::uint32_t rank, std::size_t index, on_error failed = {}) const {
        mp_trigger_t made = MP_TRIGGER_INIT;
        failed.report(mp_plan_get_trigger(get(), rank, index, &made));
        return made;
    }

    /// Blocks until the last step of a plan with partitions has finished on this rank, but at most `seconds`. The
    /// `timeout` error lists the partitions that are not ready. Throws `timeout`, `peer_gone`, `argument_error`.
    void synchronize(double seconds, on_error failed = {}) const { failed.report(mp_plan_synchronize(get(), seconds)); }

    /// Describes the plan as text or JSON: the paths, the bytes and chunks on each path, the predicted time, and the
    /// reason why each other path was rejected. Throws `argument_error` if the plan is empty.
    [[nodiscard]] std::string describe(description form = description::text, on_error failed = {}) const {
        return detail::text_of(failed, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_plan_describe(get(), static_cast<mp_format_t>(form), out, capacity, length);
        });
    }

    /// Returns properties of the plan. Throws `argument_error` if the plan is empty.
    [[nodiscard]] plan_info info(on_error failed = {}) const {
        plan_info numbers = MP_PLAN_INFO_INIT;
        failed.report(mp_plan_get_info(get(), &numbers));
        return numbers;
    }

    /// Returns the C handle, which this object still owns.
    [[nodiscard]] mp_plan_t get() const noexcept { return handle_.get(); }
    /// True if this object owns a plan.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    friend class node;
    detail::handle<mp_plan_t, detail::destroyed_by<mp_plan_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_PLAN_HPP
