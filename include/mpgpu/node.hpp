// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_NODE_HPP
#define MPGPU_NODE_HPP

/// @file
/// Nodes: groups of processes (ranks) on one machine that plan their transfers together. To create a node from an MPI
/// communicator, use `mpi::node` of mpgpu/mpi.hpp.
///
/// @code
/// mpgpu::node node(ctx, rank, ranks, "/tmp/meeting");                // collective
/// mpgpu::plan halo = node.plan_exchange({mpgpu::send_to(right, tag, edge), mpgpu::receive_from(left, tag, ghost)});
/// halo.enqueue(stream);                                              // in each time step, on every rank
/// @endcode

#include <mpgpu/buffer.hpp>
#include <mpgpu/context.hpp>
#include <mpgpu/plan.hpp>
#include <mpgpu/span.hpp>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mpgpu {

/// Window: memory range of a rank that transfers of a node's plan read or write. An alias of the C struct.
using window = mp_window_t;

/// Copy from a window (memory range) of one rank to a window of another or the same rank. It contains the destination
/// and the source, each created by `node_end`, and the number of bytes. An alias of the C struct.
using node_transfer = mp_node_transfer_t;

/// Returns a source or destination for a `node_transfer`: the position `offset` bytes after the start of a window
/// (memory range). `index` is the index, from 0, in the list of windows that rank `rank` passes to `node::plan`.
[[nodiscard]] constexpr mp_node_end_t node_end(int rank, std::uint32_t index, std::uint64_t offset = 0) noexcept {
    return {static_cast<std::uint32_t>(rank), index, offset};
}

/// Send or receive descriptor: one rank's side of a transfer. It contains this rank's memory, the other rank and a tag.
/// It does not contain the position in the other rank's memory. Created by `send_to` and `receive_from`.
struct half_transfer {
    window memory;     ///< memory range of this rank
    int rank;          ///< other rank; if negative, like `MPI_PROC_NULL`, nothing is copied
    std::uint64_t tag; ///< tag, equal in the matching send and receive descriptors
    bool is_send;      ///< true if this rank sends, false if it receives
};

namespace detail {

/// Produces a compile-time error for memory that a descriptor cannot contain. The text lists the accepted types.
template <class Memory> constexpr void refuse_memory_of_half() noexcept {
    static_assert(is_end<Memory>, "mpgpu: a descriptor takes a buffer or a device_span: other ranks cannot reach a "
                                  "std::vector or an array. Copy it into a buffer of the GPU, or into one of "
                                  "buffer<T>::shared(ctx, device::host(), size)");
    static_assert(!is_end<Memory>, "mpgpu: receive_from writes: pass a buffer or a device_span that is not const");
}

/// Gathers `count` values from every rank of a node on every rank, and returns them in rank order. All ranks call it
/// together with the same `call`, a name for error texts. Throws `rank_failed` if ranks are in different calls.
template <class T>
[[nodiscard]] std::vector<T> of_all_ranks(mp_node_t node, std::size_t ranks, const char *call, const T *mine,
                                          std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(ranks * count);
    on_error().report(mp_node_allgather(node, call, mine, all.data(), count * sizeof(T)));
    return all;
}

/// Blocks until all ranks of a node have called it with the same `call` (barrier). Throws the exceptions of
/// `of_all_ranks`.
inline void meet_all_ranks(mp_node_t node, const char *call) {
    on_error().report(mp_node_allgather(node, call, nullptr, nullptr, 0));
}

} // namespace detail

/// Returns a descriptor that sends all elements of a span to rank `rank` of the node. That rank passes a `receive_from`
/// descriptor with the calling rank and the same tag.
template <class T> [[nodiscard]] half_transfer send_to(int rank, std::uint64_t tag, device_span<T> elements) noexcept {
    // The elements are only read. NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    return {{const_cast<std::remove_const_t<T> *>(elements.data()), elements.size_bytes()}, rank, tag, true};
}
/// Returns a descriptor that sends all elements of a buffer to rank `rank` of the node.
template <class T> [[nodiscard]] half_transfer send_to(int rank, std::uint64_t tag, const buffer<T> &whole) noexcept {
    return send_to(rank, tag, device_span<const T>(whole));
}
/// Produces a compile-time error for memory that other ranks cannot access.
template <class Memory, std::enable_if_t<!detail::is_end<const Memory>, int> = 0>
[[nodiscard]] half_transfer send_to(int rank, std::uint64_t tag, const Memory & /*memory*/) noexcept {
    detail::refuse_memory_of_half<Memory>();
    return {{nullptr, 0}, rank, tag, true};
}
/// Returns a descriptor that receives all elements of a span from rank `rank` of the node. That rank passes a `send_to`
/// descriptor with the calling rank, the same tag and the same number of bytes.
template <class T>
[[nodiscard]] half_transfer receive_from(int rank, std::uint64_t tag, device_span<T> elements) noexcept {
    static_assert(!std::is_const_v<T>, "mpgpu: the destination of a receive must not be const");
    return {{elements.data(), elements.size_bytes()}, rank, tag, false};
}
/// Returns a descriptor that receives all elements of a buffer from rank `rank` of the node.
template <class T> [[nodiscard]] half_transfer receive_from(int rank, std::uint64_t tag, buffer<T> &whole) noexcept {
    return receive_from(rank, tag, device_span<T>(whole));
}
/// Produces a compile-time error for constant memory, and for memory that other ranks cannot access.
template <class Memory,
          std::enable_if_t<!detail::is_end<Memory> || std::is_const_v<std::remove_reference_t<Memory>>, int> = 0>
[[nodiscard]] half_transfer receive_from(int rank, std::uint64_t tag, Memory && /*memory*/) noexcept {
    detail::refuse_memory_of_half<Memory>();
    return {{nullptr, 0}, rank, tag, false};
}

/// Agent: the mechanism that moves each partition of a transfer to its destination: copy engines, or the kernel that
/// produces the data. See `mp_agent_t`.
enum class agent : std::int32_t {
    automatic = MP_AGENT_AUTO,          ///< the library chooses the mechanism
    copy_engine = MP_AGENT_COPY_ENGINE, ///< copy engines, over all paths; they occupy no multiprocessor
    producer = MP_AGENT_PRODUCER,       ///< the producing kernels store directly at the destination
};

/// Options for dividing the transfers of a plan into partitions, which are copied one by one as kernels produce them.
struct partitioning {
    std::uint32_t count = 0;        ///< number of partitions of each transfer; 0: the library decides
    agent mover = agent::automatic; ///< mechanism that performs the copies
    bool arrivals = true;           ///< true if receivers are notified when each partition arrives
    bool stores = false;            ///< true if `agent::automatic` may select `agent::producer` instead of copies
};

/// Options of `node::tune_partitions`, which measures how best to divide transfers into partitions.
struct partition_tuning {
    /// Agents (mechanisms that copy the partitions) to measure. With `agent::producer`, the producing kernel must write
    /// to the address that `mpgpu::trigger::destination` returns. `agent::automatic` requires `arrivals` to be false.
    std::vector<agent> agents{agent::copy_engine};
    std::uint32_t rounds = 0; ///< number of timed executions of each candidate; 0 selects 7
    bool arrivals = true;     ///< true if receivers are notified when each partition arrives
    std::string file{};       ///< path of the tuning file; if empty, the value of MPGPU_TUNING_FILE
    std::uint32_t blocks = 0; ///< thread blocks of the producing kernel; 0 if always the same number
};

/// Returns a window (memory range) that contains all elements of a span.
template <class T> [[nodiscard]] window make_window(device_span<T> elements) noexcept {
    return {elements.data(), elements.size_bytes()};
}
/// Returns a window (memory range) that contains all elements of a buffer. If the buffer is empty, the window has 0
/// bytes.
template <class T> [[nodiscard]] window make_window(buffer<T> &whole) noexcept {
    return make_window(device_span<T>(whole));
}

/// Node: group of processes (ranks) on one machine that plan their transfers together. Owns its C handle and is
/// move-only.
class node {
  public:
    /// Function that gathers `bytes` bytes from every rank on every rank, in rank order, like `MPI_Allgather`. It
    /// returns 0 on success and any other number on failure. It must not throw.
    using allgather = std::function<int(const void *send, void *receive, std::size_t bytes)>;

    /// Constructs an empty node. Every function called on it reports `status::invalid_handle`.
    node() noexcept = default;

    /// Creates a node of `ranks` ranks, in which this process is rank `rank`. All ranks call it together. Blocks until
    /// all ranks have called it.
    ///
    /// `gpus` are the GPUs that this rank uses. If the list is empty, the rank uses the GPUs that are visible to it.
    /// GPUs that are visible to several ranks are then divided evenly among these ranks. If one rank fails, the call
    /// fails on all ranks: that rank gets its own error, and the others get `rank_failed` with the reason. Throws
    /// `argument_error`, `not_supported`, `rank_failed`.
    node(const context &ctx, std::uint32_t rank, std::uint32_t ranks, allgather gather,
         array_view<const mpgpu::device> gpus = {}, on_error failed = {})
        : rank_(rank), ranks_(ranks), gather_(std::make_unique<allgather>(std::move(gather))) {
        make(ctx, rank, ranks, call, nullptr, gpus, failed);
    }
    /// Creates a node whose ranks have no allgather function. The ranks connect to each other over a Unix socket at the
    /// path `socket`. All ranks pass the same path, in a directory to which all of them can write. They wait at most
    /// one minute for each other. Throws the exceptions of the constructor above.
    node(const context &ctx, std::uint32_t rank, std::uint32_t ranks, const std::string &socket,
         array_view<const mpgpu::device> gpus = {}, on_error failed = {})
        : rank_(rank), ranks_(ranks) {
        make(ctx, rank, ranks, nullptr, socket.c_str(), gpus, failed);
    }
    /// Creates a node that consists only of this process, as rank 0 of 1. Throws the exceptions of the constructors
    /// above.
    explicit node(const context &ctx, on_error failed = {}) : ranks_(1) {
        failed.report(mp_node_create(ctx.get(), 0, 1, nullptr, nullptr, nullptr, handle_.address()));
    }

    /// Plans all transfers between the ranks together, so that they do not compete for links. Collective. Each rank
    /// passes its windows (memory ranges) and transfers that it sends or receives. Only one of the two ranks passes
    /// each transfer. See `mp_node_plan`.
    ///
    /// `mpgpu::plan::enqueue` enqueues this rank's part of a step (one execution). Every rank executes every step. If a
    /// rank destroys its plan early, ranks that have enqueued more steps get `peer_gone` (`mp_plan_destroy`). Throws
    /// `argument_error`, `not_supported`, `out_of_memory`, `rank_failed`.
    [[nodiscard]] mpgpu::plan plan(array_view<const window> windows, array_view<const node_transfer> transfers,
                                   const plan_options &options = {}, on_error failed = {}) const {
        mpgpu::plan made;
        const mp_plan_options_t c = detail::c_options(options);
        failed.report(mp_node_plan(get(), windows.data(), windows.size(), transfers.data(), transfers.size(), nullptr,
                                   &c, made.handle_.address()));
        return made;
    }

    /// Plans transfers that are divided into partitions. Each partition is copied as soon as a kernel has produced it.
    /// For each step (one execution), call `plan::arm`, enqueue the producing kernels, and call `plan::enqueue`; see
    /// `mp_plan_arm`. Throws the exceptions of the other overload of `plan`.
    [[nodiscard]] mpgpu::plan plan(array_view<const window> windows, array_view<const node_transfer> transfers,
                                   const partitioning &how, const plan_options &options = {},
                                   on_error failed = {}) const {
        mpgpu::plan made;
        const mp_plan_options_t c = detail::c_options(options);
        mp_partition_options_t partitions = MP_PARTITION_OPTIONS_INIT;
        partitions.count = how.count;
        partitions.agent = static_cast<mp_agent_t>(how.mover);
        partitions.arrivals = how.arrivals ? MP_ON : MP_OFF;
        partitions.stores = how.stores ? MP_ON : MP_OFF;
        failed.report(mp_node_plan(get(), windows.data(), windows.size(), transfers.data(), transfers.size(),
                                   &partitions, &c, made.handle_.address()));
        return made;
    }

    /// Plans the transfers that are described by send and receive descriptors. Use descriptors if the ranks do not know
    /// the positions of the data in each other's memory. Collective.
    ///
    /// Sends match receives by source, destination and tag, in the order in which each rank passes them. Window `i` of
    /// the plan is the memory of descriptor `i`. Throws the exceptions of `plan`. Throws `argument_error` if a
    /// descriptor has no match, or if the sizes of matching descriptors differ.
    [[nodiscard]] mpgpu::plan plan_exchange(array_view<const half_transfer> halves, const plan_options &options = {},
                                            on_error failed = {}) const {
        const auto [windows, transfers] = named(halves);
        return plan(windows, transfers, options, failed);
    }
    /// Plans the transfers that are described by send and receive descriptors, and divides them into partitions.
    /// `plan::trigger(rank(), i)` returns the trigger for descriptor `halves[i]`. A trigger is a kernel argument with
    /// which kernels of the sender report finished partitions, and kernels of the receiver check which partitions have
    /// arrived. With one partition per transfer, `trigger::arrived(0)` checks the whole transfer. Throws the exceptions
    /// of the overload above.
    [[nodiscard]] mpgpu::plan plan_exchange(array_view<const half_transfer> halves, const partitioning &how,
                                            const plan_options &options = {}, on_error failed = {}) const {
        const auto [windows, transfers] = named(halves);
        return plan(windows, transfers, how, options, failed);
    }

    /// Measures how best to divide transfers into partitions, and returns the fastest options. Collective. Blocks until
    /// all measurements have finished. Destinations are overwritten. See `mp_node_tune_partitions`.
    ///
    /// `produce` enqueues the kernels that produce the data of one step (one execution) in the given stream. It
    /// receives the triggers (kernel arguments, see mpgpu/trigger.cuh) of the transfers that this rank passed. This
    /// rank must be the sender of all of them. If `produce` throws, the call ends with this exception. Throws the
    /// exceptions of `plan`.
    [[nodiscard]] partitioning
    tune_partitions(array_view<const window> windows, array_view<const node_transfer> transfers,
                    const std::function<void(array_view<const mp_trigger_t>, stream_view)> &produce,
                    const partition_tuning &trials = {}, const plan_options &options = {}, on_error failed = {}) const {
        producer_call launch{produce, nullptr};
        const mp_produce_t trampoline = [](void *user, const mp_trigger_t *triggers, std::size_t count,
                                           mp_stream_t stream) {
            return static_cast<producer_call *>(user)->run(array_view<const mp_trigger_t>(triggers, count), stream);
        };
        mp_partition_tuning_t tuning = MP_PARTITION_TUNING_INIT;
        for (const agent each : trials.agents) {
            tuning.agents |= 1U << static_cast<std::uint32_t>(each);
        }
        tuning.rounds = trials.rounds;
        tuning.arrivals = trials.arrivals ? MP_ON : MP_OFF;
        tuning.blocks = trials.blocks;
        tuning.file = trials.file.empty() ? nullptr : trials.file.c_str();
        const mp_plan_options_t c = detail::c_options(options);
        mp_partition_options_t best = MP_PARTITION_OPTIONS_INIT;
        const mp_status_t status = mp_node_tune_partitions(get(), windows.data(), windows.size(), transfers.data(),
                                                           transfers.size(), trampoline, &launch, &tuning, &c, &best);
        if (launch.thrown) {
            std::rethrow_exception(launch.thrown);
        }
        failed.report(status);
        return {best.count, static_cast<agent>(best.agent), trials.arrivals, best.stores == MP_ON};
    }

    /// Makes the current or next collective call of the other ranks fail, with `rank_failed` and the text `reason`. Use
    /// it if this rank cannot make the collective call itself. Blocks until the other ranks have made their call.
    /// Throws `rank_failed`.
    void fail(const std::string &reason, on_error failed = {}) const {
        failed.report(mp_node_fail(get(), reason.c_str()));
    }

    /// Returns the rank of this process in the node.
    [[nodiscard]] int rank() const noexcept { return static_cast<int>(rank_); }
    /// Returns the number of ranks in the node. For an `mpi::node`, the communicator may have more ranks. 0 if the node
    /// is empty.
    [[nodiscard]] int size() const noexcept { return static_cast<int>(ranks_); }
    /// Returns the first GPU that this rank uses. Throws `argument_error` if it uses none, because there are more ranks
    /// than GPUs or another rank uses the GPU that both have listed.
    [[nodiscard]] mpgpu::device device(on_error failed = {}) const {
        std::int32_t id = MP_DEVICE_HOST;
        failed.report(mp_node_device(get(), &id));
        return mpgpu::device::from_id(id);
    }
    /// Returns the GPUs that this rank uses: those that it passed to the constructor or, without such a list, its share
    /// of the visible GPUs. If several ranks list the same GPU, the rank that has the fewest GPUs so far uses it. The
    /// result is empty if the rank uses no GPU. Throws `argument_error` if the node is empty.
    [[nodiscard]] std::vector<mpgpu::device> devices(on_error failed = {}) const {
        std::size_t count = 0;
        failed.report(mp_node_devices(get(), nullptr, 0, &count));
        std::vector<std::int32_t> ids(count);
        failed.report(mp_node_devices(get(), ids.data(), ids.size(), &count));
        std::vector<mpgpu::device> found;
        found.reserve(ids.size());
        for (const std::int32_t id : ids) {
            found.push_back(mpgpu::device::from_id(id));
        }
        return found;
    }
    /// Returns the C handle, which this object continues to own.
    [[nodiscard]] mp_node_t get() const noexcept { return handle_.get(); }
    /// Returns true if this object owns a node.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    /// Callback of `tune_partitions`, and the exception that it has thrown.
    struct producer_call {
        const std::function<void(array_view<const mp_trigger_t>, stream_view)> &produce;
        std::exception_ptr thrown;

        int run(array_view<const mp_trigger_t> triggers, mp_stream_t stream) {
#if MPGPU_EXCEPTIONS
            try {
                produce(triggers, stream_view(stream));
            } catch (...) {
                thrown = std::current_exception();
            }
#else
            produce(triggers, stream_view(stream)); // without exceptions, a failure ends the process
#endif
            return thrown ? 1 : 0;
        }
    };

    void make(const context &ctx, std::uint32_t rank, std::uint32_t ranks, mp_allgather_t gather, const char *socket,
              array_view<const mpgpu::device> gpus, on_error failed) {
        std::vector<std::int32_t> ids;
        for (const mpgpu::device gpu : gpus) {
            ids.push_back(gpu.id());
        }
        mp_node_options_t options = MP_NODE_OPTIONS_INIT;
        options.devices = ids.data();
        options.device_count = ids.size();
        options.socket = socket;
        failed.report(mp_node_create(ctx.get(), rank, ranks, gather, gather_.get(), &options, handle_.address()));
    }
    [[nodiscard]] std::pair<std::vector<window>, std::vector<node_transfer>>
    named(array_view<const half_transfer> halves) const {
        std::pair<std::vector<window>, std::vector<node_transfer>> made;
        for (const half_transfer &half : halves) {
            const mp_node_end_t own{rank_, static_cast<std::uint32_t>(made.first.size()), 0};
            const mp_node_end_t other{static_cast<std::uint32_t>(half.rank), MP_BY_TAG, half.tag};
            made.first.push_back(half.memory);
            // `any_rank` and the numbers of ranks on other nodes are at most `MP_FIRST_ELSEWHERE`. The library rejects
            // them with a clear error.
            const bool is_none = half.rank < 0 && half.rank > MP_FIRST_ELSEWHERE;
            made.second.push_back(is_none ? node_transfer{own, own, 0} // keeps the indices of the other transfers
                                  : half.is_send ? node_transfer{other, own, half.memory.bytes}
                                                 : node_transfer{own, other, half.memory.bytes});
        }
        return made;
    }
    static int call(void *user, const void *send, void *receive, std::size_t bytes) {
        return (*static_cast<allgather *>(user))(send, receive, bytes);
    }

    std::uint32_t rank_ = 0;
    std::uint32_t ranks_ = 0;
    std::unique_ptr<allgather> gather_; ///< allocated separately, because the library holds its address
    detail::handle<mp_node_t, detail::destroyed_by<mp_node_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_NODE_HPP
