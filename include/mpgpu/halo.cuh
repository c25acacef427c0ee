// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_CUH
#define MPGPU_HALO_CUH

/// @file
/// Pack and unpack of mpgpu/halo.hpp on CUDA: one kernel launch for all neighbours and variables of a rank. For sources
/// that nvcc compiles; the only header of mpgpu that needs the CUDA runtime.
///
/// @code
/// mpgpu::halo::options how;
/// how.copy = mpgpu::halo::cuda_copier();
/// mpgpu::halo::plan halo(ctx, grid, arrays, how);
/// @endcode

#include <mpgpu/halo.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace mpgpu::halo {

namespace detail {

constexpr unsigned copy_threads = 256;
constexpr unsigned copy_blocks = 64; // of one piece at most; 27 pieces of a few such fill the largest GPU

/// Block (x, y): every gridDim.x-th block of words of piece y.
template <direction Way> __global__ void copy_pieces(const piece *pieces) {
    const std::uint64_t first = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    copy_piece(pieces[blockIdx.y], Way, first, std::uint64_t{gridDim.x} * blockDim.x);
}

constexpr unsigned persistent_threads = 1024; // a block has a message for itself, which may lie in host memory
constexpr unsigned persistent_blocks = 32;    // with all on one message: they keep PCIe and a network busy

template <persistent_form Form>
__global__ void __launch_bounds__(persistent_threads) exchange_kernel(persistent_work work, std::uint64_t exchange) {
    exchange_messages<Form>(notify_block::current(), work, exchange);
}

inline void check_cuda(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        fail({status::driver, code, "", std::string(what) + ": " + cudaGetErrorString(code)});
    }
}

/// Makes a device current, and on destruction the one that was.
class current_device {
  public:
    explicit current_device(device where) {
        check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
        check_cuda(cudaSetDevice(where.id()), "cudaSetDevice");
    }
    current_device(const current_device &) = delete;
    current_device &operator=(const current_device &) = delete;
    ~current_device() { static_cast<void>(cudaSetDevice(before_)); }

  private:
    int before_ = 0;
};

/// A list in memory of a device, freed with the last copy of the pointer, after what is enqueued has finished.
template <class T> std::shared_ptr<buffer<T>> on_device(const context &ctx, device where, array_view<const T> list) {
    const auto kept = std::make_shared<buffer<T>>(ctx, where, list.size());
    buffer<T> host(ctx, device::host(), list.size());
    std::copy(list.begin(), list.end(), host.data());
    const stream upload(ctx, where);
    mpgpu::plan(ctx, {make_transfer(*kept, host)}).execute(upload).synchronize();
    return kept;
}

} // namespace detail

/// Packs and unpacks by a kernel, for arrays on GPUs of the CUDA backend.
[[nodiscard]] inline copier cuda_copier() {
    return [](const context &ctx, device where, array_view<const piece> pieces, direction way) -> launch_function {
        const auto kept = detail::on_device(ctx, where, pieces);
        std::uint64_t cells = 0; // of the largest piece
        for (const piece &p : pieces) {
            cells = std::max(cells, p.count[0] * p.count[1] * p.count[2]);
        }
        constexpr std::uint64_t most_pieces = 65535; // gridDim.y
        if (pieces.size() > most_pieces) {
            detail::fail(detail::refusal(status::not_supported, "how",
                                         std::to_string(pieces.size()) + " pieces on one rank: one launch takes " +
                                             std::to_string(most_pieces) + "; exchange fewer variables in a plan"));
        }
        const auto blocks = static_cast<unsigned>(
            std::min<std::uint64_t>((cells + detail::copy_threads - 1) / detail::copy_threads, detail::copy_blocks));
        return [kept, where, way, blocks](stream_view stream) {
            const detail::current_device current(where);
            const dim3 grid(blocks, static_cast<unsigned>(kept->size()));
            auto *const kernel = way == direction::pack ? &detail::copy_pieces<direction::pack>
                                                        : &detail::copy_pieces<direction::unpack>;
            kernel<<<grid, detail::copy_threads, 0, static_cast<cudaStream_t>(stream.get())>>>(kept->data());
            detail::check_cuda(cudaGetLastError(), "the kernel that packs and unpacks");
        };
    };
}

/// The kernel of `options::persistent`, for arrays on GPUs of the CUDA backend: in as many blocks as the form can use
/// and this process's part of the GPU holds at once, because blocks wait for each other and for other ranks. Processes
/// that share a GPU take equal parts, and run at the same time only under MPS.
[[nodiscard]] inline persistent_copier cuda_persistent() {
    return [](const context &ctx, device where, const detail::persistent_lists &lists, std::uint32_t sent,
              notifier tell, persistent_form form, int sharing) -> persistent_kernel {
        const bool each = form == persistent_form::block_each;
        auto *const kernel = each ? &detail::exchange_kernel<persistent_form::block_each>
                                  : &detail::exchange_kernel<persistent_form::all_blocks>;
        const detail::current_device current(where);
        int resident = 0;
        int multiprocessors = 0;
        // This also loads the kernel: at its launch that might wait for others that run.
        detail::check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                               &resident, kernel, static_cast<int>(detail::persistent_threads), 0),
                           "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
        detail::check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, where.id()),
                           "cudaDeviceGetAttribute");
        const auto most = static_cast<unsigned>(resident * multiprocessors / sharing);
        const unsigned least = each ? 2 : 1;
        if (most < least) {
            detail::fail(detail::refusal(
                status::not_supported, "how",
                "options::persistent: " + std::to_string(sharing) + " processes share a GPU that holds " +
                    std::to_string(resident * multiprocessors) + " blocks at once, and each takes at least " +
                    std::to_string(least) + ": blocks that wait for others must all run"));
        }
        const auto received = static_cast<std::uint32_t>(lists.starts.size() - 1) - sent;
        constexpr unsigned warps = detail::persistent_threads / 32;
        // With all on one message half of the GPU is left to others: a block takes a whole multiprocessor.
        const unsigned useful = each ? std::max(sent, received) + 1
                                     : std::min((lists.most_tiles() + warps - 1) / warps, detail::persistent_blocks);
        const unsigned blocks = std::clamp(useful, least, each ? most : std::max(most / 2, least));
        const auto pieces = detail::on_device<piece>(ctx, where, lists.pieces);
        const auto tiles = detail::on_device<detail::tile>(ctx, where, lists.tiles);
        const auto starts = detail::on_device<std::uint32_t>(ctx, where, lists.starts);
        return {[=](stream_view stream, std::uint64_t exchange) {
                    const detail::current_device now(where);
                    const detail::persistent_work work = {pieces->data(), tiles->data(), starts->data(),
                                                          sent,           received,      tell};
                    kernel<<<blocks, detail::persistent_threads, 0, static_cast<cudaStream_t>(stream.get())>>>(
                        work, exchange);
                    detail::check_cuda(cudaGetLastError(), "the kernel that exchanges messages with other nodes");
                },
                [](stream_view stream) {
                    const cudaError_t state = cudaStreamQuery(static_cast<cudaStream_t>(stream.get()));
                    detail::check_cuda(state == cudaErrorNotReady ? cudaSuccess : state,
                                       "the kernel that exchanges messages with other nodes");
                }};
    };
}

} // namespace mpgpu::halo

#endif // MPGPU_HALO_CUH
