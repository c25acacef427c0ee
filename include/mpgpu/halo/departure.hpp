// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_DEPARTURE_HPP
#define MPGPU_HALO_DEPARTURE_HPP

/// @file
/// Notification of the other ranks when this rank leaves a plan or an `indexed` object whose kernels wait for each
/// other. Part of mpgpu/halo.hpp; include that header.

#include <mpgpu/halo/mesh.hpp>

#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

/// Object that notifies the other ranks when this rank leaves a plan or an `indexed` object (below: plan). To each rank
/// whose kernels wait for messages of this rank, it reports the number of exchanges in which this rank took part. A
/// rank that waits for a later exchange gets `peer_gone`.
///
/// A plan with captured exchanges reports `any_exchange` instead of the number, because a graph may be launched any
/// number of times. If such a plan is destroyed by an exception, it reports 0. After another rank has exited, every
/// plan reports 0, because the kernels of this rank then send nothing more.
class departure {
  public:
    /// Stores the addresses of counters. The counter `gone` of this rank is set when a rank from which this rank
    /// expects messages exits or leaves. `there` contains the address of the same counter of each rank to which this
    /// rank sends.
    departure(mp_context_t context, std::uint64_t *gone, std::vector<std::uint64_t *> there)
        : context_(context), gone_(gone), there_(std::move(there)) {}
    departure(const departure &) = delete;
    departure(departure &&) = delete;
    departure &operator=(const departure &) = delete;
    departure &operator=(departure &&) = delete;
    ~departure() {
        const bool has_thrown = std::uncaught_exceptions() > exceptions_;
        const std::uint64_t last = !has_captured ? exchanges : has_thrown ? 0 : any_exchange;
        for (std::uint64_t *const counter : there_) { // errors for ranks that have already exited are ignored
            static_cast<void>(mp_memory_leave(context_, counter, is_abandoned() ? 0 : last));
        }
    }

    /// True if the kernels of this rank no longer wait for messages, because another rank has exited or left the plan.
    [[nodiscard]] bool is_abandoned() const noexcept {
        std::uint64_t stands = 0;
        static_cast<void>(mp_signal_read(context_, gone_, &stands));
        return stands != 0;
    }

    /// Declares that a kernel is about to wait for messages of exchange `exchange`, or of any exchange if the kernel is
    /// captured. The library then ends the wait if a rank from which this rank expects messages exits. Throws
    /// `peer_gone` if one has already exited or left.
    void expect(bool is_captured, std::uint64_t exchange) {
        has_captured = has_captured || is_captured;
        const mp_signal_t wait = {gone_, is_captured ? any_exchange : exchange};
        check(mp_kernel_wait_signals(context_, &wait, 1));
    }

    /// Makes the kernels of other ranks stop waiting for messages from this rank. The other ranks get no error.
    void give_up() const noexcept {
        for (std::uint64_t *const counter : there_) {
            static_cast<void>(mp_signal_raise(context_, counter, any_exchange));
        }
    }

    static constexpr std::uint64_t any_exchange = std::uint64_t{1} << 62U;

    std::uint64_t exchanges = 0; ///< number of exchanges that were enqueued outside of captures
    bool has_captured = false;

  private:
    mp_context_t context_;
    std::uint64_t *gone_;
    std::vector<std::uint64_t *> there_;
    int exceptions_ = std::uncaught_exceptions();
};

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_DEPARTURE_HPP
