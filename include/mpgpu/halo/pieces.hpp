// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PIECES_HPP
#define MPGPU_HALO_PIECES_HPP

/// @file
/// Part of mpgpu/halo.hpp, which programs include: cells that are packed into messages, and who does it.

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

/// A box of cells of one array and the same cells in one piece in a message. A plain value, which a kernel can take.
/// Cell (x, y, z) lies at `cells + x * element_bytes + y * row_bytes + z * plane_bytes`, and in the message at
/// `message + ((z * count[1] + y) * count[0] + x) * element_bytes`. `message` is aligned to 16 bytes.
struct piece {
    std::byte *cells;            ///< the first cell, in the array
    std::byte *message;          ///< the first cell, in the message
    std::uint64_t element_bytes; ///< of one cell
    std::uint64_t count[3];      ///< cells of the box; no std::array, which device code may not index
    std::uint64_t row_bytes;     ///< from a row of the array to the next
    std::uint64_t plane_bytes;   ///< from a plane of the array to the next
};

/// Which way `launch` copies.
enum class direction : std::int32_t {
    pack,  ///< from the cells into the message
    unpack ///< from the message into the cells
};

/// Enqueues the copies of a set of pieces, in either a kernel or a host function; called once in each exchange.
using launch_function = std::function<void(stream_view)>;

/// Makes a `launch` for pieces of one device. Called when a plan is made, for each form of it that is tried at most
/// three times for each rank. The pieces lie in host memory and are gone after the call: a copier for CUDA copies them
/// to the device. Pieces do not overlap. The stream that the `launch` is called with is of that device.
using copier = std::function<launch_function(const context &, device, array_view<const piece>, direction)>;

/// Copies pieces on the calling thread; for arrays and messages that the CPU reaches.
inline void copy_on_cpu(array_view<const piece> pieces, direction way) noexcept {
    for (const piece &p : pieces) {
        const std::uint64_t bytes = p.count[0] * p.element_bytes;
        std::byte *message = p.message;
        for (std::uint64_t z = 0; z < p.count[2]; ++z) {
            for (std::uint64_t y = 0; y < p.count[1]; ++y, message += bytes) {
                std::byte *row = p.cells + z * p.plane_bytes + y * p.row_bytes;
                std::byte *to = way == direction::pack ? message : row;
                const std::byte *from = way == direction::pack ? row : message;
                if (bytes == sizeof(std::uint64_t)) { // one cell of the faces in x: a call for each would cost more
                    std::memcpy(to, from, sizeof(std::uint64_t));
                } else {
                    std::memcpy(to, from, bytes);
                }
            }
        }
    }
}

/// Whether one kernel moves all messages of a rank to and from other nodes.
enum class persistent_form : std::int32_t {
    none,       ///< a kernel packs, the host waits for it and calls MPI, and another kernel unpacks
    block_each, ///< one kernel, a block of it for each message
    all_blocks  ///< one kernel, all blocks of it on one message after the other
};

namespace detail {
struct persistent_lists;
struct pushed_messages;
} // namespace detail

/// A kernel that packs, waits and unpacks.
struct persistent_kernel {
    /// Enqueues exchange n, which counts from 1.
    std::function<void(stream_view, std::uint64_t)> launch;
    /// Throws where the kernel, launched in this stream, has failed; never blocks.
    std::function<void(stream_view)> check;
};

/// Makes a `persistent_kernel` for one device: of lists in host memory, gone after the call, of which the first
/// messages, so many, are sent; with the notifications of that kernel, its form, and the number of processes that share
/// the device.
using persistent_copier = std::function<persistent_kernel(const context &, device, const detail::persistent_lists &,
                                                          std::uint32_t, notifier, persistent_form, int)>;

/// Makes the kernel of an exchange in which messages are pushed, for one device: of messages in host memory, gone after
/// the call, and the number of processes that share the device. The kernel is launched once in each exchange, always
/// after the last launch has ended.
using pushing_copier = std::function<launch_function(const context &, device, const detail::pushed_messages &, int)>;

/// What MPI is given where messages go to other nodes.
enum class mpi_memory : std::int32_t {
    automatic, ///< device memory where MPI says that it takes it, and on the host backend; else staged
    device,    ///< device memory, whatever MPI says: for an MPI that is GPU-aware and does not say so
    staged     ///< host memory, with a copy at either end
};

/// Who brings messages to and from ranks of other nodes on, between `plan::start` and `plan::finish`.
enum class progress_by {
    start,  ///< `start` waits until they are packed, and `finish` until they have arrived
    caller, ///< whoever calls `plan::progress`; `start` does not wait, and `finish` does what is left
    thread  ///< a thread of the plan, which polls from `start` on and needs MPI_THREAD_MULTIPLE
};

/// How far an exchange with ranks of other nodes is. Large messages count as several.
struct exchange_progress {
    std::size_t packed = 0;     ///< and given to MPI
    std::size_t sent = 0;       ///< their memory may be written again
    std::size_t to_send = 0;    ///< in all
    std::size_t received = 0;   ///< have arrived
    std::size_t to_receive = 0; ///< in all
    /// Whether nothing is left.
    [[nodiscard]] bool is_done() const noexcept { return sent == to_send && received == to_receive; }
};

/// How to exchange.
struct options {
    /// Cells that two ranks exchange over one face, edge or corner go straight into the ghost cells, unpacked, where
    /// they lie in at most this many pieces; each piece of each variable is a transfer. 0: always pack. The largest
    /// value: never pack. Empty: what is fastest here, which making the plan measures by exchanges in a row in up to
    /// three forms: all packed, single pieces straight, and as many rows straight as make 16384 transfers or fewer. One
    /// of more pieces must be faster by more than 5 %; one that is refused is left out.
    /// The ghost cells are written then, as by any exchange, and nothing else may be writing to the arrays.
    std::optional<std::uint64_t> direct_pieces;
    /// Packs and unpacks; empty: CPU loops, which only the host backend can use.
    copier copy;
    /// How the transfers are planned: between processes by `mpgpu::node::plan`, for all ranks of a node together.
    plan_options transfers;
    /// For plans that span nodes.
    mpi_memory between_nodes = mpi_memory::automatic;
    /// For plans that span nodes; the same on all ranks.
    persistent_form persistent = persistent_form::none;
    /// The kernel for that: on CUDA `cuda_persistent()` of mpgpu/halo.cuh. Empty: CPU threads, which only the host
    /// backend can use.
    persistent_copier persistent_copy;
    /// For plans that span nodes.
    progress_by progress = progress_by::start;
    /// Whether the kernel that packs writes each message straight into the memory of the rank that receives it and
    /// tells it, so that nothing is copied; between processes the same kernel unpacks what arrives, and is all of an
    /// exchange. All ranks must be on one node. Everything is packed: true goes with no `direct_pieces` but 0. Empty:
    /// measured beside the forms above, where `direct_pieces` is left empty, and taken if faster by more than 5 %.
    std::optional<bool> pushed;
    /// The kernel for that: on CUDA `cuda_pushed()` of mpgpu/halo.cuh. Empty: CPU threads, which only the host backend
    /// can use.
    pushing_copier pushed_copy;
};

namespace detail {

[[nodiscard]] inline copier cpu_copier() {
    return [](const context &ctx, device, array_view<const piece> pieces, direction way) -> launch_function {
        // Shared with what is enqueued, which may outlive the plan.
        const auto kept = std::make_shared<const std::vector<piece>>(pieces.begin(), pieces.end());
        return [context = ctx.get(), kept, way](stream_view stream) {
            check(mpgpu::detail::launch_host(context, stream.get(), [kept, way] { copy_on_cpu(*kept, way); }));
        };
    };
}

} // namespace detail

} // namespace mpgpu::halo

#endif // MPGPU_HALO_PIECES_HPP
