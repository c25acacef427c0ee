// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_NOTIFY_HPP
#define MPGPU_NOTIFY_HPP

/// @file
/// Notifications between a running kernel and CPU threads: functions for the CPU threads. Needs only mpgpu.hpp.
/// mpgpu/notify.cuh contains the functions for kernels.
///
/// @code
/// mpgpu::notifications told(ctx, mpgpu::device::gpu(0), 2);
/// work<<<blocks, threads, 0, stream>>>(told.in_kernel());
/// told.synchronize(0, step, std::chrono::seconds(10), "the first half"); // until the kernel has set notification 0
/// ...                                                                // reads data of the kernel
/// told.raise(1, step);                                               // the kernel, still running, continues
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

/// Counters that a running kernel sets and CPU threads wait for, or vice versa. `notifier` describes the rules for each
/// counter.
///
/// Owns 128 bytes of pinned host memory and 16 bytes of GPU memory per counter. Move-only. The destructor blocks until
/// all work that is enqueued in the context has finished, so notify a kernel that still waits for a notification before
/// the object is destroyed. Several threads may call `const` functions concurrently.
class notifications {
  public:
    /// Constructs an object without notifications.
    notifications() noexcept = default;
    /// Creates `count` notifications with the value 0, for kernels of the device `where`. Blocks until a small copy to
    /// the device has finished. Throws `argument_error`, `out_of_memory`, `driver_error`.
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

    /// Returns the number of notifications.
    [[nodiscard]] std::size_t size() const noexcept { return counters_.size(); }

    /// Returns the argument to pass to the kernel, by value. It is valid as long as this object exists.
    [[nodiscard]] notifier in_kernel() noexcept { return {counters_.data(), mirrors_.data(), size()}; }

    /// Sets notification `index` to `value`, for a kernel that waits for it. A kernel that sees the value also sees
    /// everything that the calling thread has written before. Never blocks.
    void raise(std::size_t index, std::uint64_t value) noexcept {
        detail::store<detail::reach::system>(&counters_.data()[index].value, value);
    }

    /// Returns the value of notification `index`. Never blocks.
    [[nodiscard]] std::uint64_t value(std::size_t index) const noexcept {
        return detail::load<detail::reach::system>(&counters_.data()[index].value);
    }
    /// Returns true if the value of notification `index` is at least `least`. The calling thread may then read the data
    /// that the kernel wrote before it set the notification. Never blocks.
    [[nodiscard]] bool test(std::size_t index, std::uint64_t least) const noexcept { return value(index) >= least; }

    /// Blocks the calling thread until the value of notification `index` is at least `least`. The thread polls. Throws
    /// `timeout` if the wait takes longer than `most`. The error text contains the index, the value and, if given,
    /// `name`.
    void synchronize(std::size_t index, std::uint64_t least, std::chrono::nanoseconds most,
                     const std::string &name = {}, on_error failed = {}) const {
        const auto begin = std::chrono::steady_clock::now();
        while (!test(index, least)) {
            if (std::chrono::steady_clock::now() - begin >= most) {
                error_details late;
                late.status = status::timeout;
                late.argument = "index";
                late.message = "notification " + std::to_string(index) + (name.empty() ? "" : " (" + name + ")") +
                               " was not set within " + std::to_string(std::chrono::duration<double>(most).count()) +
                               " s: its value is " + std::to_string(value(index)) + ", and " + std::to_string(least) +
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
