// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_CUH
#define MPGPU_HALO_CUH

/// @file
/// CUDA kernels for mpgpu/halo.hpp and mpgpu/halo_indexed.hpp. One launch packs or unpacks the messages for all
/// neighbours and variables of a rank, or performs a whole exchange. Include this header in sources that nvcc compiles.
/// This is the only header of mpgpu that needs the CUDA runtime.
///
/// @code
/// mpgpu::halo::options how;
/// how.copy = mpgpu::halo::cuda_copier();
/// how.pushed_copy = mpgpu::halo::cuda_pushed();
/// mpgpu::halo::plan halo(ctx, grid, arrays, how);
/// @endcode

#include <mpgpu/halo.hpp>
#include <mpgpu/halo/index_arrays.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace mpgpu::halo {

namespace detail {

constexpr unsigned copy_threads = 256;
constexpr unsigned copy_blocks = 64; // maximum number of blocks per piece; 27 pieces then fill the largest GPU

/// Kernel that packs or unpacks pieces (boxes of cells). Block (x, y) copies every gridDim.x-th group of words of piece
/// y.
template <direction Way> __global__ void copy_pieces(const piece *pieces) {
    const std::uint64_t first = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    copy_piece(pieces[blockIdx.y], Way, first, std::uint64_t{gridDim.x} * blockDim.x);
}

constexpr unsigned persistent_threads = 1024; // one block packs a whole message, which may be in host memory
constexpr unsigned persistent_blocks = 32;    // maximum if all blocks pack one message; saturates PCIe

template <persistent_form Form>
__global__ void __launch_bounds__(persistent_threads) exchange_kernel(persistent_work work, std::uint64_t exchange) {
    exchange_messages<Form>(notify_block::current(), work, exchange);
}

constexpr unsigned pushed_threads = 256; // few, so that a small face is packed by many multiprocessors

/// Kernel that performs a rank's part of an exchange with pushed messages. Four blocks per multiprocessor keep enough
/// loads in flight to hide the latency of memory.
__global__ void __launch_bounds__(pushed_threads, 4) push_kernel(const __grid_constant__ pushed_work work) {
    push_messages(notify_block::current(), work);
}

/// Kernel that performs a rank's part of an exchange by index lists.
__global__ void __launch_bounds__(pushed_threads, 4) indexed_kernel(const __grid_constant__ index_work work) {
    exchange_indexed(notify_block::current(), work);
}

inline void check_cuda(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        fail({status::driver, code, "", std::string(what) + ": " + cudaGetErrorString(code)});
    }
}

/// Scope guard that makes a device current and restores the previous one.
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

/// Returns the number of blocks of a kernel that can run simultaneously on the current GPU, if the GPU is divided
/// evenly among the processes that share it. Throws if the number is less than `least`.
template <class Kernel>
unsigned blocks_at_once(const char *form, Kernel *kernel, unsigned threads, device where, int sharing, unsigned least) {
    int resident = 0;
    int multiprocessors = 0;
    // The query also loads the kernel. If it were loaded at its launch, the launch could wait for running kernels.
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, static_cast<int>(threads), 0),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, where.id()),
               "cudaDeviceGetAttribute");
    const auto most = static_cast<unsigned>(resident * multiprocessors / sharing);
    if (most < least) {
        fail(refusal(status::not_supported, "how",
                     std::string(form) + ": " + std::to_string(sharing) + " processes share a GPU that holds " +
                         std::to_string(resident * multiprocessors) +
                         " blocks at once, and each process needs at least " + std::to_string(least) +
                         ": blocks that wait for each other must all run at the same time"));
    }
    return most;
}

/// Reservation of thread blocks for a kernel that waits for other ranks. Kernels of several plans may wait at the same
/// time, in a different order on each rank. Therefore the blocks of all plans of this process must be able to run
/// simultaneously. A plan reserves at most half of the remaining blocks.
class waiting_blocks {
  public:
    /// Reserves at most `useful` blocks on the device `where`. `at_once` is the number of blocks that can run
    /// simultaneously on this device. `form` is the name of the exchange method, for error texts.
    waiting_blocks(const char *form, device where, unsigned at_once, unsigned useful) : where_(where.id()) {
        const std::lock_guard<std::mutex> locked(all().mutex);
        unsigned &taken = all().taken[where_];
        if (taken >= at_once) {
            fail(refusal(status::not_supported, "how",
                         std::string(form) + ": this process can run " + std::to_string(at_once) +
                             " blocks at once on GPU " + std::to_string(where_) +
                             ", and other halo::plan or halo::indexed objects of this process have reserved all of "
                             "them; destroy one of these objects, or do not use " +
                             form));
        }
        count_ = std::clamp(useful, 1U, std::max((at_once - taken) / 2, 1U));
        taken += count_;
    }
    waiting_blocks(const waiting_blocks &) = delete;
    waiting_blocks(waiting_blocks &&) = delete;
    waiting_blocks &operator=(const waiting_blocks &) = delete;
    waiting_blocks &operator=(waiting_blocks &&) = delete;
    ~waiting_blocks() {
        const std::lock_guard<std::mutex> locked(all().mutex);
        all().taken[where_] -= count_;
    }

    [[nodiscard]] unsigned count() const noexcept { return count_; }

  private:
    struct table {
        std::mutex mutex;
        std::map<int, unsigned> taken; ///< number of reserved blocks, by device
    };
    static table &all() {
        static table one;
        return one;
    }

    int where_;
    unsigned count_ = 0;
};

/// Enables access from the current device to the memory of this process's other GPUs, so that kernels can write
/// messages there. Memory of other processes is already mapped for the device.
inline void reach(const pushed_messages &messages, device where) {
    for (const pushed_message &m : messages.sent) {
        cudaPointerAttributes there{};
        if (m.flag != nullptr) {
            continue;
        }
        check_cuda(cudaPointerGetAttributes(&there, m.pieces.front().message), "cudaPointerGetAttributes");
        if (there.device == where.id()) {
            continue;
        }
        int can = 0;
        check_cuda(cudaDeviceCanAccessPeer(&can, where.id(), there.device), "cudaDeviceCanAccessPeer");
        if (can == 0) {
            fail(refusal(status::not_supported, "how",
                         "options::pushed: GPU " + std::to_string(where.id()) + " cannot write to memory of GPU " +
                             std::to_string(there.device) +
                             "; do not set options::pushed if GPUs have no peer access"));
        }
        const cudaError_t enabled = cudaDeviceEnablePeerAccess(there.device, 0);
        if (enabled == cudaErrorPeerAccessAlreadyEnabled) {
            static_cast<void>(cudaGetLastError()); // clears the last CUDA error
        } else {
            check_cuda(enabled, "cudaDeviceEnablePeerAccess");
        }
    }
}

/// Copies a list to device memory. The memory is freed with the last copy of the returned pointer, after enqueued work
/// has finished.
template <class T> std::shared_ptr<buffer<T>> on_device(const context &ctx, device where, array_view<const T> list) {
    const auto kept = std::make_shared<buffer<T>>(ctx, where, list.size());
    if (list.empty()) {
        return kept;
    }
    buffer<T> host(ctx, device::host(), list.size());
    std::copy(list.begin(), list.end(), host.data());
    const stream upload(ctx, where);
    mpgpu::plan(ctx, {make_transfer(*kept, host)}).execute(upload).synchronize();
    return kept;
}

/// Lists of pieces and tiles to which a `persistent_work` (kernel argument) refers, in device memory.
class lists_on_device {
  public:
    lists_on_device(const context &ctx, device where, const persistent_lists &lists)
        : pieces_(on_device<piece>(ctx, where, lists.pieces)), tiles_(on_device<tile>(ctx, where, lists.tiles)),
          starts_(on_device<std::uint32_t>(ctx, where, lists.starts)) {}

    /// Returns the kernel argument that refers to these lists.
    [[nodiscard]] persistent_work work(std::uint32_t sent, notifier tell) const {
        const auto received = static_cast<std::uint32_t>(starts_->size() - 1) - sent;
        return {pieces_->data(), tiles_->data(), starts_->data(), sent, received, tell};
    }

  private:
    std::shared_ptr<buffer<piece>> pieces_;
    std::shared_ptr<buffer<tile>> tiles_;
    std::shared_ptr<buffer<std::uint32_t>> starts_;
};

/// Throws an error if a kernel in this stream has failed.
inline void check_persistent(stream_view stream) {
    const cudaError_t state = cudaStreamQuery(static_cast<cudaStream_t>(stream.get()));
    check_cuda(state == cudaErrorNotReady ? cudaSuccess : state, "the kernel that exchanges messages with other nodes");
}

} // namespace detail

/// Returns a value for `options::copy` that packs and unpacks by a CUDA kernel, for arrays on GPUs.
[[nodiscard]] inline copier cuda_copier() {
    return [](const context &ctx, device where, array_view<const piece> pieces, direction way) -> launch_function {
        const auto kept = detail::on_device(ctx, where, pieces);
        std::uint64_t cells = 0; // number of cells of the largest piece
        for (const piece &p : pieces) {
            cells = std::max(cells, p.count[0] * p.count[1] * p.count[2]);
        }
        constexpr std::uint64_t most_pieces = 65535; // limit of gridDim.y
        if (pieces.size() > most_pieces) {
            detail::fail(detail::refusal(status::not_supported, "how",
                                         std::to_string(pieces.size()) +
                                             " pieces on one rank: one launch can process " +
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

/// Returns a value for `options::persistent_copy` that uses a CUDA kernel, for arrays on GPUs. The number of blocks
/// depends on `options::persistent`. It does not exceed the number that can run simultaneously on this process's share
/// of the GPU, because blocks wait for each other and for other ranks. Processes that share a GPU get equal shares;
/// their kernels run concurrently only under MPS.
[[nodiscard]] inline persistent_copier cuda_persistent() {
    return [](const context &ctx, device where, const detail::persistent_lists &lists, std::uint32_t sent,
              notifier tell, persistent_form form, int sharing) -> persistent_kernel {
        const bool each = form == persistent_form::block_each;
        auto *const kernel = each ? &detail::exchange_kernel<persistent_form::block_each>
                                  : &detail::exchange_kernel<persistent_form::all_blocks>;
        const detail::current_device current(where);
        const unsigned least = each ? 2 : 1;
        const unsigned most =
            detail::blocks_at_once("options::persistent", kernel, detail::persistent_threads, where, sharing, least);
        const auto received = static_cast<std::uint32_t>(lists.starts.size() - 1) - sent;
        constexpr unsigned warps = detail::persistent_threads / 32;
        // If all blocks pack the same message, each block occupies a multiprocessor. Half of the multiprocessors are
        // left to other work.
        const unsigned useful = each ? std::max(sent, received) + 1
                                     : std::min((lists.most_tiles() + warps - 1) / warps, detail::persistent_blocks);
        const unsigned blocks = std::clamp(useful, least, each ? most : std::max(most / 2, least));
        const detail::lists_on_device kept(ctx, where, lists);
        return {[kept, where, kernel, blocks, sent, tell](stream_view stream, std::uint64_t exchange) {
                    const detail::current_device now(where);
                    kernel<<<blocks, detail::persistent_threads, 0, static_cast<cudaStream_t>(stream.get())>>>(
                        kept.work(sent, tell), exchange);
                    detail::check_cuda(cudaGetLastError(), "the kernel that exchanges messages with other nodes");
                },
                detail::check_persistent};
    };
}

/// Returns a value for `options::persistent_copy` that launches the program's own CUDA kernel (see `own_kernel`), for
/// arrays on GPUs. When `launch` is called, the rank's GPU is current. All blocks of the kernel must run
/// simultaneously, beside all other work on the GPU, so launch it by `cudaLaunchCooperativeKernel`.
[[nodiscard]] inline persistent_copier cuda_own_kernel(own_launch launch) {
    return [launch = std::move(launch)](const context &ctx, device where, const detail::persistent_lists &lists,
                                        std::uint32_t sent, notifier tell, persistent_form, int) -> persistent_kernel {
        const detail::current_device current(where);
        const detail::lists_on_device kept(ctx, where, lists);
        return {[kept, where, launch, sent, tell](stream_view stream, std::uint64_t exchange) {
                    const detail::current_device now(where);
                    launch(stream, kept.work(sent, tell), exchange);
                    detail::check_cuda(cudaGetLastError(), "the program's kernel that exchanges messages");
                },
                detail::check_persistent};
    };
}

/// Returns a value for `options::pushed_copy` that uses a CUDA kernel, for arrays on GPUs. If each rank is a process,
/// the blocks of the kernel wait for other ranks. Therefore a plan uses at most half of the blocks that can run
/// simultaneously on this process's share of the GPU, and all plans together use at most all of them. Processes that
/// share a GPU get equal shares; their kernels run concurrently only under MPS.
[[nodiscard]] inline pushing_copier cuda_pushed() {
    return [](const context &ctx, device where, const detail::pushed_messages &messages,
              int sharing) -> launch_function {
        const detail::current_device current(where);
        const unsigned most =
            detail::blocks_at_once("options::pushed", &detail::push_kernel, detail::pushed_threads, where, sharing, 1);
        detail::reach(messages, where);
        const detail::pushed_lists lists(messages);
        constexpr unsigned warps = detail::pushed_threads / 32;
        const unsigned useful = (lists.most_tiles(messages) + warps - 1) / warps;
        const bool waits = messages.gone != nullptr;
        const auto reserved =
            waits ? std::make_shared<const detail::waiting_blocks>("options::pushed", where, most, useful) : nullptr;
        const unsigned blocks = waits ? reserved->count() : std::clamp(useful, 1U, most);
        const auto pieces = detail::on_device<piece>(ctx, where, lists.pieces);
        const auto tiles = detail::on_device<detail::tile>(ctx, where, lists.tiles);
        const auto state = detail::on_device<detail::pushed_state>(ctx, where, std::vector<detail::pushed_state>(1));
        const auto work = std::make_shared<const detail::pushed_work>(
            detail::work_of(messages, lists, blocks, pieces->data(), tiles->data(), state->data()));
        return [reserved, pieces, tiles, state, work, where, blocks](stream_view stream) {
            const detail::current_device now(where);
            detail::push_kernel<<<blocks, detail::pushed_threads, 0, static_cast<cudaStream_t>(stream.get())>>>(*work);
            detail::check_cuda(cudaGetLastError(), "the kernel that pushes messages");
        };
    };
}

namespace detail {

/// Arrays to which an `index_work` (kernel argument) refers, in device memory, and the blocks of the kernel.
class indexed_on_device {
  public:
    indexed_on_device(const context &ctx, device where, const index_arrays &arrays, unsigned at_once)
        : blocks_("halo::indexed", where, at_once, useful_blocks(arrays)),
          messages_(on_device<index_message>(ctx, where, arrays.messages)),
          sends_(on_device<std::uint64_t>(ctx, where, arrays.sends)),
          receives_(on_device<std::uint64_t>(ctx, where, arrays.receives)),
          narrow_(on_device<std::uint32_t>(ctx, where, arrays.narrow)),
          wide_(on_device<std::uint64_t>(ctx, where, arrays.wide)),
          targets_(on_device<index_target>(ctx, where, arrays.targets)),
          terms_(on_device<index_term>(ctx, where, arrays.terms)),
          state_(on_device<index_state>(ctx, where, std::vector<index_state>(1))), work_(arrays.values()) {
        work_.messages = messages_->data();
        work_.sends = sends_->data();
        work_.receives = receives_->data();
        work_.narrow = arrays.wide.empty() ? narrow_->data() : nullptr;
        work_.wide = wide_->data();
        work_.targets = targets_->data();
        work_.terms = terms_->data();
        work_.state = state_->data();
    }

    /// Returns the kernel argument for one launch.
    [[nodiscard]] index_work work(const index_call &call) const {
        index_work made = work_;
        made.call = call;
        return made;
    }
    [[nodiscard]] unsigned blocks() const noexcept { return blocks_.count(); }

  private:
    /// Returns the number of blocks with which each thread copies a few words of the largest exchange.
    static unsigned useful_blocks(const index_arrays &arrays) {
        constexpr std::uint64_t most = 65536;
        constexpr std::uint64_t block_bytes = std::uint64_t{pushed_threads} * 4 * sizeof(double);
        return static_cast<unsigned>(std::min(arrays.most_bytes() / block_bytes + 1, most));
    }

    waiting_blocks blocks_;
    std::shared_ptr<buffer<index_message>> messages_;
    std::shared_ptr<buffer<std::uint64_t>> sends_;
    std::shared_ptr<buffer<std::uint64_t>> receives_;
    std::shared_ptr<buffer<std::uint32_t>> narrow_;
    std::shared_ptr<buffer<std::uint64_t>> wide_;
    std::shared_ptr<buffer<index_target>> targets_;
    std::shared_ptr<buffer<index_term>> terms_;
    std::shared_ptr<buffer<index_state>> state_;
    index_work work_;
};

} // namespace detail

/// Returns a value for `index_options::kernel` that uses a CUDA kernel, for vectors on GPUs. The blocks of the kernel
/// wait for other ranks. The number of blocks is limited as for `cuda_pushed`.
[[nodiscard]] inline index_kernel cuda_indexed() {
    return [](const context &ctx, device where, const detail::index_arrays &arrays, int sharing) -> index_launch {
        const detail::current_device current(where);
        const unsigned most =
            detail::blocks_at_once("halo::indexed", &detail::indexed_kernel, detail::pushed_threads, where, sharing, 1);
        const auto kept = std::make_shared<const detail::indexed_on_device>(ctx, where, arrays, most);
        return [kept, where](stream_view stream, const detail::index_call &call) {
            const detail::current_device now(where);
            detail::
                indexed_kernel<<<kept->blocks(), detail::pushed_threads, 0, static_cast<cudaStream_t>(stream.get())>>>(
                    kept->work(call));
            detail::check_cuda(cudaGetLastError(), "the kernel that exchanges entries by index lists");
        };
    };
}

} // namespace mpgpu::halo

#endif // MPGPU_HALO_CUH
