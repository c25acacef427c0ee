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

/// Copies every `stride`-th word of a piece from word `first` on.
template <class Word>
__host__ __device__ inline void copy_words(const piece &p, direction way, std::uint64_t first, std::uint64_t stride) {
    const std::uint64_t row_words = p.count[0] * p.element_bytes / sizeof(Word);
    const std::uint64_t words = row_words * p.count[1] * p.count[2];
    Word *const message = reinterpret_cast<Word *>(p.message);
    for (std::uint64_t i = first; i < words; i += stride) {
        const std::uint64_t row = i / row_words;
        std::byte *const start = p.cells + row / p.count[1] * p.plane_bytes + row % p.count[1] * p.row_bytes;
        Word *const cell = reinterpret_cast<Word *>(start) + i % row_words;
        if (way == direction::pack) {
            message[i] = *cell;
        } else {
            *cell = message[i];
        }
    }
}

/// The same in the widest words to which all rows of the piece are aligned.
__host__ __device__ inline void copy_piece(const piece &p, direction way, std::uint64_t first, std::uint64_t stride) {
    const std::uint64_t all =
        reinterpret_cast<std::uintptr_t>(p.cells) | p.element_bytes | p.row_bytes | p.plane_bytes; // low bits say it
    if (all % sizeof(std::uint64_t) == 0) {
        copy_words<std::uint64_t>(p, way, first, stride);
    } else if (all % sizeof(std::uint32_t) == 0) {
        copy_words<std::uint32_t>(p, way, first, stride);
    } else {
        copy_words<std::uint8_t>(p, way, first, stride);
    }
}

/// Block (x, y): every gridDim.x-th block of words of piece y.
template <direction Way> __global__ void copy_pieces(const piece *pieces) {
    const std::uint64_t first = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    copy_piece(pieces[blockIdx.y], Way, first, std::uint64_t{gridDim.x} * blockDim.x);
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

} // namespace detail

/// Packs and unpacks by a kernel, for arrays on GPUs of the CUDA backend.
[[nodiscard]] inline copier cuda_copier() {
    return [](const context &ctx, device where, array_view<const piece> pieces, direction way) -> launch_function {
        // Freed with the last copy of the launch, after what is enqueued has finished.
        const auto kept = std::make_shared<buffer<piece>>(ctx, where, pieces.size());
        buffer<piece> host(ctx, device::host(), pieces.size());
        std::copy(pieces.begin(), pieces.end(), host.data());
        const stream upload(ctx, where);
        mpgpu::plan(ctx, {make_transfer(*kept, host)}).execute(upload).synchronize();

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

} // namespace mpgpu::halo

#endif // MPGPU_HALO_CUH
