// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_PLAN_HPP
#define MPGPU_PLAN_HPP

/// @file
/// Plans: how a batch of transfers is carried out.

#include <mpgpu/context.hpp>
#include <mpgpu/request.hpp>
#include <mpgpu/transfer.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace mpgpu {

/// What runs a plan.
enum class engine : std::int32_t {
    automatic = MP_ENGINE_AUTO, ///< the one that the model finds fastest
    stream = MP_ENGINE_STREAM,  ///< copies on internal streams, joined by events
    graph = MP_ENGINE_GRAPH,    ///< the same copies as one graph launch
    batch = MP_ENGINE_BATCH,    ///< direct copies in batched calls
    kernel = MP_ENGINE_KERNEL   ///< direct copies in fused kernels
};

/// How to plan. A field left alone is decided by the environment, then by the tuning file, then by the model.
struct plan_options {
    /// What runs the plan.
    mpgpu::engine engine = mpgpu::engine::automatic;
    /// The most paths that one transfer may use; 0: left to the model.
    std::uint32_t max_paths = 0;
    /// Whether a copy between GPUs may also pass through host memory. Left alone, it may.
    std::optional<bool> host_path;
    /// Bytes of one chunk on staged paths; 0: left to the model.
    std::uint64_t chunk_bytes = 0;
    /// Transfers below this many bytes take one path; 0: left to the model.
    std::uint64_t min_bytes = 0;
    /// The most staging memory on each device, bytes; 0: the context's bound.
    std::uint64_t staging_bytes = 0;
    /// GPUs through which bytes of others may pass: bit `g` is GPU `g`, `MP_RELAY_NONE` alone is none. 0: all.
    std::uint64_t relay_gpus = 0;
    /// Whether executions choose among variants of the plan by how long they take. Left alone, they do; plans of a node
    /// do not.
    std::optional<bool> adapt;
    /// Chunks of each path through another GPU, before `chunk_bytes`; 0: left to the model.
    std::uint32_t relay_chunks = 0;
    /// The same for paths through host memory.
    std::uint32_t host_chunks = 0;
};

namespace detail {

/// The same as C has it.
[[nodiscard]] inline mp_switch_t c_switch(std::optional<bool> on) noexcept {
    return on ? (*on ? MP_ON : MP_OFF) : MP_DEFAULT;
}

/// The same as the C struct.
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

/// What a plan promises: bytes, paths, modelled seconds, and measured ones where there are any. The C struct.
using plan_info = mp_plan_info_t;

/// How a batch of transfers is carried out: made once, executed as often as wanted, from any thread.
///
/// Owns it, and is move-only. Its destructor does not wait: executions that are enqueued still finish. That of a plan
/// of a `node` blocks until the steps that were enqueued here have finished, for which the other ranks must come to
/// them.
class plan {
  public:
    /// No plan: every call reports `status::invalid_handle`.
    plan() noexcept = default;

    /// Plans the transfers of one communication step together, so that they do not fight for links. They are unordered
    /// among each other, so no destination may overlap another destination or a source. The memory must exist whenever
    /// the plan is executed; the array of transfers is not kept. Throws `argument_error`, `not_supported`,
    /// `out_of_memory`.
    plan(const context &ctx, array_view<const transfer> transfers, const plan_options &options = {},
         on_error failed = {}) {
        const mp_plan_options_t c = detail::c_options(options);
        failed.report(mp_plan(ctx.get(), transfers.data(), transfers.size(), &c, handle_.address()));
    }

    /// Makes what the first execution in `stream` would otherwise make, so that it costs what later ones cost; enqueues
    /// nothing. For a time loop, before the first step: may take milliseconds, and may wait for work of the GPUs.
    /// `mp_plan_prepare` says more. Throws as `execute` does.
    void prepare(stream_view stream, on_error failed = {}) const {
        failed.report(mp_plan_prepare(get(), stream.get()));
    }

    /// Enqueues the copies: after all earlier work in `stream`, before all later work in it. Never blocks. Executions
    /// of one plan, or of plans that share staging memory, may be enqueued in different streams at once. Throws
    /// `argument_error`, `out_of_memory`, `driver_error`.
    [[nodiscard]] request execute(stream_view stream, on_error failed = {}) const {
        request done;
        failed.report(mp_execute(get(), stream.get(), done.handle_.address()));
        return done;
    }

    /// `execute` for code that is ordered by streams alone: makes no request. Throws as `execute` does.
    void enqueue(stream_view stream, on_error failed = {}) const {
        failed.report(mp_execute(get(), stream.get(), nullptr));
    }

    /// Begins a step of a plan with partitions: after all earlier work in `stream`, before what makes them ready.
    /// `enqueue` or `execute` follows after that. `mp_plan_arm` says more. Throws `argument_error`, `peer_gone`.
    void arm(stream_view stream, on_error failed = {}) const { failed.report(mp_plan_arm(get(), stream.get())); }

    /// What kernels need that produce or consume a transfer in partitions (mpgpu/trigger.cuh): number `transfer` of
    /// those that `rank` handed in. Throws `argument_error`.
    [[nodiscard]] mp_trigger_t trigger(std::uint32_t rank, std::size_t index, on_error failed = {}) const {
        mp_trigger_t made = MP_TRIGGER_INIT;
        failed.report(mp_plan_get_trigger(get(), rank, index, &made));
        return made;
    }

    /// Blocks until the last step of a plan with partitions has finished here, at most so many seconds. The error names
    /// the partitions that are missing. Throws `timeout`, `peer_gone`, `argument_error`.
    void synchronize(double seconds, on_error failed = {}) const { failed.report(mp_plan_synchronize(get(), seconds)); }

    /// Paths, shares, chunks, modelled time, and why each other path was not taken. Throws `argument_error` when this
    /// is empty.
    [[nodiscard]] std::string describe(description form = description::text, on_error failed = {}) const {
        return detail::text_of(failed, [&](char *out, std::size_t capacity, std::size_t *length) {
            return mp_plan_describe(get(), static_cast<mp_format_t>(form), out, capacity, length);
        });
    }

    /// The plan in numbers; its seconds are modelled, not measured. Throws `argument_error` when this is empty.
    [[nodiscard]] plan_info info(on_error failed = {}) const {
        plan_info numbers = MP_PLAN_INFO_INIT;
        failed.report(mp_plan_get_info(get(), &numbers));
        return numbers;
    }

    /// The C handle, still owned by this object.
    [[nodiscard]] mp_plan_t get() const noexcept { return handle_.get(); }
    /// Whether this owns a plan.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    friend class node;
    detail::handle<mp_plan_t, detail::destroyed_by<mp_plan_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_PLAN_HPP
