// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PIECES_HPP
#define MPGPU_HALO_PIECES_HPP

/// @file
/// Cells that are packed into messages, and the functions that pack them. Part of mpgpu/halo.hpp; include that header.

#include <mpgpu/halo/mesh.hpp>
#include <mpgpu/notify.cuh>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace mpgpu::halo {

/// Box of cells of one array, and the same cells stored contiguously in a message. A plain value that a kernel can
/// take. Cell (x, y, z) is at `cells + x * element_bytes + y * row_bytes + z * plane_bytes`, and in the message at
/// `message + ((z * count[1] + y) * count[0] + x) * element_bytes`. `message` is aligned to 16 bytes.
struct piece {
    std::byte *cells;            ///< first cell in the array
    std::byte *message;          ///< first cell in the message
    std::uint64_t element_bytes; ///< size of one cell, bytes
    std::uint64_t count[3];      ///< cells of the box; no std::array, which device code may not index
    std::uint64_t row_bytes;     ///< bytes from a row of the array to the next
    std::uint64_t plane_bytes;   ///< bytes from a plane of the array to the next
};

/// Direction in which `launch` copies.
enum class direction : std::int32_t {
    pack,  ///< from the cells into the message
    unpack ///< from the message into the cells
};

/// Function that enqueues the copies for a set of pieces, as a kernel or a host function. It is called once per
/// exchange.
using launch_function = std::function<void(stream_view)>;

/// Function that creates a `launch_function` for pieces of one device. It is called when a plan is made, at most three
/// times per rank for each method that is tried. The list of pieces is in host memory and is invalid after the call, so
/// a copier for CUDA copies it to the device. Pieces do not overlap. The launch function is called with a stream on the
/// device.
using copier = std::function<launch_function(const context &, device, array_view<const piece>, direction)>;

/// Copies pieces (boxes of cells) on the calling thread, for arrays and messages that the CPU can access.
inline void copy_on_cpu(array_view<const piece> pieces, direction way) noexcept {
    for (const piece &p : pieces) {
        const std::uint64_t bytes = p.count[0] * p.element_bytes;
        std::byte *message = p.message;
        for (std::uint64_t z = 0; z < p.count[2]; ++z) {
            for (std::uint64_t y = 0; y < p.count[1]; ++y, message += bytes) {
                std::byte *row = p.cells + z * p.plane_bytes + y * p.row_bytes;
                std::byte *to = way == direction::pack ? message : row;
                const std::byte *from = way == direction::pack ? row : message;
                if (bytes == sizeof(std::uint64_t)) { // one cell of a face in x: inlined, faster than a call
                    std::memcpy(to, from, sizeof(std::uint64_t));
                } else {
                    std::memcpy(to, from, bytes);
                }
            }
        }
    }
}

/// Kind of kernel that packs and unpacks all messages of a rank to and from other nodes.
enum class persistent_form : std::int32_t {
    none,       ///< a kernel packs, the host waits for it and calls MPI, and another kernel unpacks
    block_each, ///< one kernel with one block per message
    all_blocks  ///< one kernel, all blocks of which copy one message after the other
};

namespace detail {
struct persistent_lists;
struct pushed_messages;
} // namespace detail

/// Kernel that packs, waits and unpacks.
struct persistent_kernel {
    /// Enqueues the exchange with the given number, counted from 1.
    std::function<void(stream_view, std::uint64_t)> launch;
    /// Throws if the kernel that was launched in this stream has failed. Never blocks.
    std::function<void(stream_view)> check;
};

/// Function that creates a `persistent_kernel` for one device. Its arguments are the lists of messages, the number of
/// messages that are sent (the first ones in the lists), the notifier between kernel and CPU thread, the kind of
/// kernel, and the number of processes that share the device. The lists are in host memory and are invalid after the
/// call.
using persistent_copier = std::function<persistent_kernel(const context &, device, const detail::persistent_lists &,
                                                          std::uint32_t, notifier, persistent_form, int)>;

/// Function that creates the kernel for exchanges in which messages are pushed, for one device. Its arguments are the
/// messages, which are in host memory and invalid after the call, and the number of processes that share the device.
/// The kernel is launched once per exchange, always after the previous launch has ended.
using pushing_copier = std::function<launch_function(const context &, device, const detail::pushed_messages &, int)>;

/// Memory that is passed to MPI for messages to other nodes.
enum class mpi_memory : std::int32_t {
    automatic, ///< device memory if MPI reports support for it, and on the host backend; otherwise staged
    device,    ///< device memory, for a GPU-aware MPI that does not report its support
    staged     ///< host memory, with a copy by the sender and one by the receiver
};

/// Thread that makes progress on messages to and from ranks of other nodes, between `plan::start` and `plan::finish`.
enum class progress_by {
    start,  ///< thread that calls `start` and `finish`; `start` waits for packing, `finish` for arrival
    caller, ///< threads that call `plan::progress`; `start` does not wait, and `finish` does the rest
    thread  ///< thread that the plan creates, which polls from `start` on; requires MPI_THREAD_MULTIPLE
};

/// Progress of an exchange with ranks of other nodes. A large message counts as several.
struct exchange_progress {
    std::size_t packed = 0;     ///< packed and passed to MPI
    std::size_t sent = 0;       ///< sent, so that their memory may be written again
    std::size_t to_send = 0;    ///< total number to send
    std::size_t received = 0;   ///< received
    std::size_t to_receive = 0; ///< total number to receive
    /// Returns true if all messages were sent and received.
    [[nodiscard]] bool is_done() const noexcept { return sent == to_send && received == to_receive; }
};

/// Options of a halo exchange.
struct options {
    /// Maximum number of contiguous pieces of a region that is copied directly into ghost cells, without packing. A
    /// region consists of the cells that two ranks exchange over one face, edge or corner; each piece of each variable
    /// is one transfer. 0 packs all regions, the largest value packs none.
    ///
    /// If it is empty, making the plan measures back-to-back exchanges with up to three values and selects the fastest:
    /// 0, 1, and the largest value with at most 16384 transfers. A larger value must be faster by more than 5 %, and a
    /// value that fails is skipped. The measurement writes the ghost cells as any exchange does, so nothing else may
    /// write to the arrays meanwhile.
    std::optional<std::uint64_t> direct_pieces;
    /// Function that creates the pack and unpack operations. Empty: CPU loops, which only the host backend can use.
    copier copy;
    /// Options for planning the transfers. Between processes `mpgpu::node::plan` plans them for all ranks of a node
    /// together.
    plan_options transfers;
    /// Kind of memory that is passed to MPI, for plans that span nodes.
    mpi_memory between_nodes = mpi_memory::automatic;
    /// Kind of kernel that packs and unpacks messages to other nodes, for plans that span nodes. Equal on all ranks.
    persistent_form persistent = persistent_form::none;
    /// Function that creates that kernel, on CUDA `cuda_persistent()` of mpgpu/halo.cuh. Empty: CPU threads, which only
    /// the host backend can use.
    persistent_copier persistent_copy;
    /// Thread that makes progress on messages, for plans that span nodes.
    progress_by progress = progress_by::start;
    /// True if the kernel that packs also writes each message directly into the memory of the receiving rank and
    /// notifies it, so that no copy is needed. Between processes the same kernel also unpacks arriving messages and
    /// performs the whole exchange. All ranks must be on one node. All regions are packed, so true requires
    /// `direct_pieces` to be empty or 0. Empty: measured together with the values of `direct_pieces`, if that is empty
    /// too, and used if it is faster by more than 5 %.
    std::optional<bool> pushed;
    /// Function that creates that kernel, on CUDA `cuda_pushed()` of mpgpu/halo.cuh. Empty: CPU threads, which only the
    /// host backend can use.
    pushing_copier pushed_copy;
};

namespace detail {

[[nodiscard]] inline copier cpu_copier() {
    return [](const context &ctx, device, array_view<const piece> pieces, direction way) -> launch_function {
        // Shared with enqueued work, which may outlive the plan.
        const auto kept = std::make_shared<const std::vector<piece>>(pieces.begin(), pieces.end());
        return [context = ctx.get(), kept, way](stream_view stream) {
            check(mpgpu::detail::launch_host(context, stream.get(), [kept, way] { copy_on_cpu(*kept, way); }));
        };
    };
}

} // namespace detail

} // namespace mpgpu::halo

#endif // MPGPU_HALO_PIECES_HPP
