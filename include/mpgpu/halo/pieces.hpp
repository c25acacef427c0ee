// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_PIECES_HPP
#define MPGPU_HALO_PIECES_HPP

/// @file
/// Options of halo exchanges, and the boxes of cells (pieces) that are packed into messages. Part of mpgpu/halo.hpp;
/// include that header.

#include <mpgpu/halo/mesh.hpp>
#include <mpgpu/notify.cuh>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace mpgpu::halo {

/// Piece: a box of cells of one array, together with the place in a message at which these cells are stored
/// contiguously. A plain value that can be a kernel argument.
///
/// Cell (x, y, z) of the box is at `cells + x * element_bytes + y * row_bytes + z * plane_bytes` in the array, and at
/// `message + ((z * count[1] + y) * count[0] + x) * element_bytes` in the message. `message` is aligned to 16 bytes.
struct piece {
    std::byte *cells;            ///< address of the first cell in the array
    std::byte *message;          ///< address of the first cell in the message
    std::uint64_t element_bytes; ///< size of one cell in bytes
    std::uint64_t count[3];      ///< number of cells in x, y and z; device code cannot index a std::array
    std::uint64_t row_bytes;     ///< distance of adjacent rows of the array in bytes
    std::uint64_t plane_bytes;   ///< distance of adjacent planes of the array in bytes
};

/// Direction in which cells are copied between an array and a message.
enum class direction : std::int32_t {
    pack,  ///< from the array into the message
    unpack ///< from the message into the array
};

/// Function that enqueues the copies of a set of pieces (boxes of cells) in the given stream, as a kernel or a host
/// function. The plan calls it once per exchange.
using launch_function = std::function<void(stream_view)>;

/// Function that creates a `launch_function` which packs or unpacks pieces (boxes of cells) on one device. It is called
/// when a plan is created, at most three times per rank for each exchange method that is measured.
///
/// The list of pieces is in host memory and is valid only during the call, so a copier for CUDA copies it to the
/// device. Pieces do not overlap. The launch function is called with a stream of the device.
using copier = std::function<launch_function(const context &, device, array_view<const piece>, direction)>;

/// Packs or unpacks pieces (boxes of cells) on the calling thread. The CPU must be able to access the arrays and
/// messages.
inline void copy_on_cpu(array_view<const piece> pieces, direction way) noexcept {
    for (const piece &p : pieces) {
        const std::uint64_t bytes = p.count[0] * p.element_bytes;
        std::byte *message = p.message;
        for (std::uint64_t z = 0; z < p.count[2]; ++z) {
            for (std::uint64_t y = 0; y < p.count[1]; ++y, message += bytes) {
                std::byte *row = p.cells + z * p.plane_bytes + y * p.row_bytes;
                std::byte *to = way == direction::pack ? message : row;
                const std::byte *from = way == direction::pack ? row : message;
                if (bytes == sizeof(std::uint64_t)) { // one cell of a face across x: inlined, faster than a call
                    std::memcpy(to, from, sizeof(std::uint64_t));
                } else {
                    std::memcpy(to, from, bytes);
                }
            }
        }
    }
}

/// Kind of kernel that packs and unpacks the messages of a rank to and from ranks on other nodes.
enum class persistent_form : std::int32_t {
    none,       ///< no such kernel: separate kernels pack and unpack, and the host calls MPI in between
    block_each, ///< one kernel for the whole exchange; each block handles one message
    all_blocks  ///< one kernel for the whole exchange; all blocks together handle one message after another
};

namespace detail {
struct persistent_lists;
struct pushed_messages;
} // namespace detail

/// Kernel that performs a whole exchange with ranks on other nodes: packs, waits for messages, and unpacks.
struct persistent_kernel {
    /// Launches the kernel for one exchange in the given stream. The second argument is the number of the exchange,
    /// from 1.
    std::function<void(stream_view, std::uint64_t)> launch;
    /// Throws an error if the kernel that was launched in the given stream has failed. Never blocks.
    std::function<void(stream_view)> check;
};

/// Function that creates a `persistent_kernel` for one device. Its arguments after the device are:
/// - the lists of messages, which are in host memory and valid only during the call,
/// - the number of messages that are sent (the first ones in the lists),
/// - the notifier between the kernel and a CPU thread,
/// - the kind of kernel,
/// - the number of processes that share the device.
using persistent_copier = std::function<persistent_kernel(const context &, device, const detail::persistent_lists &,
                                                          std::uint32_t, notifier, persistent_form, int)>;

/// Function that creates the kernel for exchanges with pushed messages (`options::pushed`), for one device. Its
/// arguments after the device are the messages, which are in host memory and valid only during the call, and the number
/// of processes that share the device. The kernel is launched once per exchange, always after the previous launch has
/// ended.
using pushing_copier = std::function<launch_function(const context &, device, const detail::pushed_messages &, int)>;

/// Kind of memory that is passed to MPI for messages to and from ranks on other nodes.
enum class mpi_memory : std::int32_t {
    automatic, ///< device memory on the host backend, and if MPI reports support for it; otherwise staged
    device,    ///< device memory, for a GPU-aware MPI that does not report its support
    staged     ///< host memory; sender and receiver each make an additional copy
};

/// Thread that makes progress on messages to and from ranks on other nodes, between `plan::start` and `plan::finish`.
enum class progress_by {
    start,  ///< thread that calls `start`, which blocks until all is packed, and `finish`, which blocks until received
    caller, ///< threads that call `plan::progress`; `start` does not block, and `finish` completes the exchange
    thread  ///< separate thread that the plan creates and that polls; requires MPI_THREAD_MULTIPLE
};

/// Progress of an exchange with ranks on other nodes, counted in messages. A large message is sent, and counted, as
/// several messages.
struct exchange_progress {
    std::size_t packed = 0;     ///< number of messages that are packed and passed to MPI
    std::size_t sent = 0;       ///< number of messages that are sent, so that their memory may be reused
    std::size_t to_send = 0;    ///< total number of messages to send
    std::size_t received = 0;   ///< number of messages that are received
    std::size_t to_receive = 0; ///< total number of messages to receive
    /// Returns true if all messages were sent and received.
    [[nodiscard]] bool is_done() const noexcept { return sent == to_send && received == to_receive; }
};

/// Options of a halo exchange.
struct options {
    /// Limit that decides which regions are packed. A region consists of the cells that two ranks exchange across one
    /// face, edge or corner. A region of at most this number of contiguous pieces is copied directly into ghost cells,
    /// with one transfer per piece and variable. A region of more pieces is packed into a message. With the value 0 all
    /// regions are packed. With the largest value of the type no region is packed.
    ///
    /// If this option is empty, the plan's constructor measures back-to-back exchanges with up to three values: 0, 1,
    /// and the largest value that leads to at most 16384 transfers. It selects the value with the fastest exchanges. A
    /// larger value is selected only if it is faster by more than 5 %. A value that fails is skipped. The measurement
    /// writes ghost cells like any exchange, so nothing else may write to the arrays at that time.
    std::optional<std::uint64_t> direct_pieces;
    /// Function that creates the pack and unpack operations, on CUDA `cuda_copier()` of mpgpu/halo.cuh. If it is empty,
    /// CPU loops are used, which is possible only on the host backend.
    copier copy;
    /// Options of the plan that executes the transfers between ranks of a node.
    plan_options transfers;
    /// Kind of memory that is passed to MPI. Used only if there are ranks on other nodes.
    mpi_memory between_nodes = mpi_memory::automatic;
    /// Kind of kernel that packs and unpacks messages to and from ranks on other nodes. Equal on all ranks.
    persistent_form persistent = persistent_form::none;
    /// Function that creates the kernel that `persistent` selects, on CUDA `cuda_persistent()` of mpgpu/halo.cuh. If it
    /// is empty, CPU threads are used, which is possible only on the host backend.
    persistent_copier persistent_copy;
    /// Thread that makes progress on messages to and from ranks on other nodes.
    progress_by progress = progress_by::start;
    /// Longest time that an exchange waits for ranks on other nodes, for example `std::chrono::seconds(60)`. If it is
    /// empty, an exchange waits without limit, even if such a rank has exited, because MPI does not report that.
    ///
    /// The time starts when this rank has reached the exchange: its stream has packed the messages or, with
    /// `persistent`, has started the kernel. The exchange fails with `timeout` if its messages have not all been sent
    /// and received within this time. The error names the ranks of the communicator that this rank waits for. The plan
    /// can then only be destroyed. A rank that reaches the exchange early also waits for later ranks, so the limit must
    /// exceed the largest difference between the times at which ranks reach it. The time between two calls of `start`,
    /// `progress` or `finish` counts as at most a sixteenth of the limit. Ranks may have different limits. Ranks on one
    /// node are not affected: they detect an exited rank without a limit.
    std::optional<std::chrono::nanoseconds> time_limit;
    /// True if messages are pushed: the kernel that packs a message writes it directly into the memory of the receiving
    /// rank and notifies that rank, so no separate copy is needed. If each rank is a process, the same kernel also
    /// unpacks arriving messages, and so performs the whole exchange.
    ///
    /// All ranks must be on one node. All regions are packed, so `direct_pieces` must be empty or 0. If both options
    /// are empty, pushed messages are measured too, and are used if they are faster than the other methods by more than
    /// 5 %.
    std::optional<bool> pushed;
    /// Function that creates the kernel for `pushed`, on CUDA `cuda_pushed()` of mpgpu/halo.cuh. If it is empty, CPU
    /// threads are used, which is possible only on the host backend.
    pushing_copier pushed_copy;
    /// Number of layers of cells that an exchange transfers, for all variables. It may be less than the ghost widths of
    /// the arrays. The layers next to the computed cells are then exchanged, and the other ghost cells are not changed.
    /// If this option is empty, the ghost widths of the grid or domain are used. Equal on all ranks.
    std::optional<layers> depth;
};

namespace detail {

[[nodiscard]] inline copier cpu_copier() {
    return [](const context &ctx, device, array_view<const piece> pieces, direction way) -> launch_function {
        // Shared ownership, because enqueued work may outlive the plan.
        const auto kept = std::make_shared<const std::vector<piece>>(pieces.begin(), pieces.end());
        return [context = ctx.get(), kept, way](stream_view stream) {
            check(mpgpu::detail::launch_host(context, stream.get(), [kept, way] { copy_on_cpu(*kept, way); }));
        };
    };
}

} // namespace detail

} // namespace mpgpu::halo

#endif // MPGPU_HALO_PIECES_HPP
