// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_NOTIFY_HPP
#define MPGPU_NOTIFY_HPP

/// @file
/// Notifications between a running kernel and CPU threads, the threads' side: a header over mpgpu.hpp and nothing else.
/// The kernel's side is mpgpu/notify.cuh.
///
/// @code
/// mpgpu::notifications told(ctx, mpgpu::device::gpu(0), 2);
/// work<<<blocks, threads, 0, stream>>>(told.in_kernel());
/// told.synchronize(0, step, std::chrono::seconds(10), "the first half"); // until the kernel has raised notification 0
/// ...                                                                // reads what the kernel has written
/// told.raise(1, step);                                               // the kernel, still running, goes on
/// @endcode

#include <mpgpu/mpgpu.hpp>
#include <mpgpu/notify.cuh>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>

namespace mpgpu {

/// Counters that a kernel raises and CPU threads wait for, or the other way round; see `notifier` for what holds of
/// each.
///
/// Owns 128 bytes of pinned host memory and 16 bytes of the GPU's for each. Move-only. Its destructor waits, as those
/// of all buffers, until everything enqueued in the context has finished: a kernel that still waits must be told first.
/// `const` functions may be called by several threads at once.
class notifications {
  public:
    /// Owns none.
    notifications() noexcept = default;
    /// `count` notifications, which stand at 0, for kernels of `where`. Blocks for one small copy. Throws
    /// `argument_error`, `out_of_memory`, `driver_error`.
    notifications(const context &ctx, device where, std::size_t count)
        : counters_(ctx, device::host(), count), mirrors_(ctx, where, count) {
        if (count == 0) {
            return;
        }
        std::fill_n(counters_.data(), count, notification_counter{});
        buffer<notification_mirror> zeros(ctx, device::host(), count);
        std::fill_n(zeros.data(), count, notification_mirror{});
        const stream order(ctx, where);
        plan(ctx, {make_transfer(mirrors_, zeros)}).enqueue(order);
        order.synchronize();
    }

    /// Notifications.
    [[nodiscard]] std::size_t size() const noexcept { return counters_.size(); }

    /// What a kernel takes, by value; good for as long as this object.
    [[nodiscard]] notifier in_kernel() noexcept { return {counters_.data(), mirrors_.data(), size()}; }

    /// Raises a notification that a kernel waits for, after all that the calling thread has written. Never blocks.
    void raise(std::size_t index, std::uint64_t value) noexcept {
        detail::store<detail::reach::system>(&counters_.data()[index].value, value);
    }

    /// What a notification stands at. Never blocks.
    [[nodiscard]] std::uint64_t value(std::size_t index) const noexcept {
        return detail::load<detail::reach::system>(&counters_.data()[index].value);
    }
    /// Whether a notification stands at `least` or more: what the kernel had written before may then be read. Never
    /// blocks.
    [[nodiscard]] bool test(std::size_t index, std::uint64_t least) const noexcept { return value(index) >= least; }

    /// Blocks the calling thread until a notification stands at `least` or more: polls. Throws `timeout` after `most`,
    /// with the notification's index, `name` if it is given, and what it stands at.
    void synchronize(std::size_t index, std::uint64_t least, std::chrono::nanoseconds most,
                     const std::string &name = {}, on_error failed = {}) const {
        const auto begin = std::chrono::steady_clock::now();
        while (!test(index, least)) {
            if (std::chrono::steady_clock::now() - begin >= most) {
                error_details late;
                late.status = status::timeout;
                late.argument = "index";
                late.message = "notification " + std::to_string(index) + (name.empty() ? "" : " (" + name + ")") +
                               " has not come in " + std::to_string(std::chrono::duration<double>(most).count()) +
                               " s: it stands at " + std::to_string(value(index)) + ", and " + std::to_string(least) +
                               " is waited for";
                failed.report(std::move(late));
                return;
            }
            std::this_thread::yield();
        }
        failed.report(MP_SUCCESS);
    }

  private:
    buffer<notification_counter> counters_;
    buffer<notification_mirror> mirrors_;
};

} // namespace mpgpu

#endif // MPGPU_NOTIFY_HPP
