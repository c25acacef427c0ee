// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_TESTS_HALO_PART_HPP
#define MPGPU_TESTS_HALO_PART_HPP

/// @file
/// One rank of a halo exchange, for tests that run on the host backend and on GPUs. The rank's arrays are on its
/// device. They are set and compared in host memory. If this file is compiled by nvcc, exchanges use the packing
/// kernel. With any other compiler, exchanges on GPUs must not pack.

#include "halo_reference.hpp"

#ifdef __CUDACC__
#include <mpgpu/halo.cuh>
#endif

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace halo_test {

inline bool on_host_backend(const mpgpu::context &ctx) {
    return ctx.backend() == mpgpu::backend::host;
}

/// Returns the device for the arrays of rank `rank`. If there are fewer GPUs than ranks, the GPUs are assigned
/// cyclically.
inline mpgpu::device device_of(const mpgpu::context &ctx, int rank) {
    return mpgpu::device::gpu(rank % ctx.devices().gpus);
}

/// Makes the GPU of this process's rank the current GPU, because the current GPU is the one that maps memory of other
/// processes.
inline void select_device([[maybe_unused]] const mpgpu::context &ctx, [[maybe_unused]] int rank) {
#ifdef __CUDACC__
    if (!on_host_backend(ctx)) {
        mpgpu::halo::detail::check_cuda(cudaSetDevice(device_of(ctx, rank).id()), "cudaSetDevice");
    }
#endif
}

/// Returns the options of an exchange. They contain the packing kernel if the arrays are on GPUs and the kernel was
/// compiled.
inline mpgpu::halo::options options_for([[maybe_unused]] const mpgpu::context &ctx) {
    mpgpu::halo::options how;
#ifdef __CUDACC__
    if (!on_host_backend(ctx)) {
        how.copy = mpgpu::halo::cuda_copier();
        how.persistent_copy = mpgpu::halo::cuda_persistent();
        how.pushed_copy = mpgpu::halo::cuda_pushed();
    }
#endif
    return how;
}

inline bool can_pack(const mpgpu::context &ctx) {
    return on_host_backend(ctx) || options_for(ctx).copy;
}

class part {
  public:
    part(const mpgpu::context &ctx, mpgpu::halo::grid g, int rank, const std::vector<std::size_t> &sizes)
        : grid_(g), rank_(rank), where_(device_of(ctx, rank)) {
        const std::size_t elements = halo_reference::elements(grid_, rank);
        std::vector<mpgpu::transfer> up;
        std::vector<mpgpu::transfer> down;
        for (const std::size_t bytes : sizes) {
            mpgpu::memory &there = on_device_.emplace_back(ctx, where_, elements * bytes);
            mpgpu::memory &here = on_host_.emplace_back(ctx, mpgpu::device::host(), elements * bytes);
            arrays_.push_back({there.data(), where_, bytes, elements});
            mirrors_.push_back({here.data(), mpgpu::device::host(), bytes, elements});
            up.push_back(mpgpu::make_transfer(there, here));
            down.push_back(mpgpu::make_transfer(here, there));
        }
        upload_.emplace(ctx, up);
        download_.emplace(ctx, down);
    }

    [[nodiscard]] mpgpu::device where() const noexcept { return where_; }
    /// Returns the rank's arrays on the device.
    [[nodiscard]] const mpgpu::halo::rank_arrays &arrays() const noexcept { return arrays_; }

    /// Enqueues a copy of the arrays from host memory to the device. `download` copies in the other direction.
    void upload(mpgpu::stream_view stream) const { upload_->enqueue(stream); }
    void download(mpgpu::stream_view stream) const { download_->enqueue(stream); }

    /// Sets the arrays in host memory to the values of a cycle. It may be called in `stream::launch_host`.
    void fill(std::uint64_t cycle) const { halo_reference::fill(grid_, rank_, mirrors_, cycle); }
    [[nodiscard]] std::string first_difference(std::uint64_t cycle) const {
        return halo_reference::first_difference(grid_, rank_, mirrors_, cycle);
    }

  private:
    mpgpu::halo::grid grid_;
    int rank_;
    mpgpu::device where_;
    std::vector<mpgpu::memory> on_device_;
    std::vector<mpgpu::memory> on_host_;
    mpgpu::halo::rank_arrays arrays_;
    mpgpu::halo::rank_arrays mirrors_;
    std::optional<mpgpu::plan> upload_;
    std::optional<mpgpu::plan> download_;
};

} // namespace halo_test

#endif // MPGPU_TESTS_HALO_PART_HPP
