// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_NODE_HPP
#define MPGPU_NODE_HPP

/// @file
/// Nodes: groups of ranks, each in its own process, that plan transfers together. `mpi::node`, in mpgpu/mpi.hpp, is a
/// node made from an MPI communicator.
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

/// Memory range that a rank passes to a plan of the node, so that the plan's transfers may refer to it. The C struct.
using window = mp_window_t;

/// Copy between windows (memory ranges) of two ranks, or within one rank. It consists of the destination and the
/// source, each a `node_end`, and the number of bytes. The C struct.
using node_transfer = mp_node_transfer_t;

/// Returns the source or destination of a `node_transfer`: the address `offset` bytes after the beginning of a window.
/// `window` is the index among the windows that `rank` passes.
[[nodiscard]] constexpr mp_node_end_t node_end(int rank, std::uint32_t index, std::uint64_t offset = 0) noexcept {
    return {static_cast<std::uint32_t>(rank), index, offset};
}

/// Send or receive descriptor: one rank's side of a transfer. It contains this rank's memory, the other rank and a tag,
/// but no address in the other rank's memory. `send_to` and `receive_from` create it.
struct half_transfer {
    window memory;     ///< memory of this rank
    int rank;          ///< other rank; if it is below 0, like `MPI_PROC_NULL`, nothing is moved
    std::uint64_t tag; ///< equal in the send and the receive descriptor
    bool is_send;      ///< true if this rank sends the bytes
};

namespace detail {

/// Fails to compile for memory that a descriptor cannot contain. The message names the accepted types.
template <class Memory> constexpr void refuse_memory_of_half() noexcept {
    static_assert(is_end<Memory>, "mpgpu: a descriptor takes a buffer or a device_span: other ranks cannot reach a "
                                  "std::vector or an array. Copy it into a buffer of the GPU, or into one of "
                                  "buffer<T>::shared(ctx, device::host(), size)");
    static_assert(!is_end<Memory>, "mpgpu: receive_from writes: pass a buffer or a device_span that is not const");
}

/// Gathers `count` values from every rank of a node, in rank order. All ranks call it together with the same `call`,
/// which is the name that errors show. Throws `rank_failed` if ranks are in different calls.
template <class T>
[[nodiscard]] std::vector<T> of_all_ranks(mp_node_t node, std::size_t ranks, const char *call, const T *mine,
                                          std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(ranks * count);
    on_error().report(mp_node_allgather(node, call, mine, all.data(), count * sizeof(T)));
    return all;
}

/// Blocks until all ranks of a node have called it with the same `call`. Throws the exceptions of `of_all_ranks`.
inline void meet_all_ranks(mp_node_t node, const char *call) {
    on_error().report(mp_node_allgather(node, call, nullptr, nullptr, 0));
}

} // namespace detail

/// Returns a descriptor that sends all bytes of a span to a rank of the node. That rank passes `receive_from` with this
/// rank and the same tag.
template <class T> [[nodiscard]] half_transfer send_to(int rank, std::uint64_t tag, device_span<T> elements) noexcept {
    // The elements are only read. NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    return {{const_cast<std::remove_const_t<T> *>(elements.data()), elements.size_bytes()}, rank, tag, true};
}
/// Returns a descriptor that sends all bytes of a buffer.
template <class T> [[nodiscard]] half_transfer send_to(int rank, std::uint64_t tag, const buffer<T> &whole) noexcept {
    return send_to(rank, tag, device_span<const T>(whole));
}
/// Rejects other memory at compile time, because other ranks cannot access it.
template <class Memory, std::enable_if_t<!detail::is_end<const Memory>, int> = 0>
[[nodiscard]] half_transfer send_to(int rank, std::uint64_t tag, const Memory & /*memory*/) noexcept {
    detail::refuse_memory_of_half<Memory>();
    return {{nullptr, 0}, rank, tag, true};
}
/// Returns a descriptor that receives all bytes of a span from a rank of the node. That rank passes `send_to` with this
/// rank, the same tag and the same number of bytes.
template <class T>
[[nodiscard]] half_transfer receive_from(int rank, std::uint64_t tag, device_span<T> elements) noexcept {
    static_assert(!std::is_const_v<T>, "mpgpu: the destination of a receive must not be const");
    return {{elements.data(), elements.size_bytes()}, rank, tag, false};
}
/// Returns a descriptor that receives all bytes of a buffer.
template <class T> [[nodiscard]] half_transfer receive_from(int rank, std::uint64_t tag, buffer<T> &whole) noexcept {
    return receive_from(rank, tag, device_span<T>(whole));
}
/// Rejects other memory at compile time, because other ranks cannot access it. Also rejects constant memory.
template <class Memory,
          std::enable_if_t<!detail::is_end<Memory> || std::is_const_v<std::remove_reference_t<Memory>>, int> = 0>
[[nodiscard]] half_transfer receive_from(int rank, std::uint64_t tag, Memory && /*memory*/) noexcept {
    detail::refuse_memory_of_half<Memory>();
    return {{nullptr, 0}, rank, tag, false};
}

/// Mechanism that moves the partitions of a transfer as soon as they are ready: copy engines or the producing kernel.
enum class agent : std::int32_t {
    automatic = MP_AGENT_AUTO,          ///< chosen by the library
    copy_engine = MP_AGENT_COPY_ENGINE, ///< copy engines, over all paths; they use no multiprocessor
    producer = MP_AGENT_PRODUCER,       ///< producing kernels, which store their bytes at the destination
};

/// Options of transfers that are divided into partitions.
struct partitioning {
    std::uint32_t count = 0;        ///< partitions of each transfer; 0 lets the model choose
    agent mover = agent::automatic; ///< mechanism that moves ready partitions
    bool arrivals = true;           ///< true if receivers are notified when each partition arrives
    bool stores = false;            ///< true if `agent::automatic` may let producers store at the destination
};

/// Candidates and limits of `node::tune_partitions`.
struct partition_tuning {
    /// Mechanisms to try for moving the partitions. With `agent::producer`, the kernel must write to the address that
    /// `mpgpu::trigger::destination` returns. `agent::automatic` requires `arrivals` to be false.
    std::vector<agent> agents{agent::copy_engine};
    std::uint32_t rounds = 0; ///< number of timed steps for each candidate; 0 selects 7
    bool arrivals = true;     ///< true if receivers are notified when each partition arrives
    std::string file{};       ///< file that stores the measurements; if empty, the file that MPGPU_TUNING_FILE names
    std::uint32_t blocks = 0; ///< thread blocks of the kernel, for programs that tune with several block counts
};

/// Returns a window of all bytes of a span.
template <class T> [[nodiscard]] window make_window(device_span<T> elements) noexcept {
    return {elements.data(), elements.size_bytes()};
}
/// Returns a window of all bytes of a buffer, with 0 bytes if the buffer is empty.
template <class T> [[nodiscard]] window make_window(buffer<T> &whole) noexcept {
    return make_window(device_span<T>(whole));
}

/// Node: group of ranks on one machine that plan transfers together. Owns its C handle and is move-only.
class node {
  public:
    /// Function that gathers `bytes` bytes from every rank on every rank, in rank order, as `MPI_Allgather` does.
    /// Returns 0 on success and any other number on failure. Must not throw.
    using allgather = std::function<int(const void *send, void *receive, std::size_t bytes)>;

    /// Constructs an empty node. Every call on it reports `status::invalid_handle`.
    node() noexcept = default;

    /// Creates a node of `ranks` ranks, in which this process is rank `rank`. All ranks call it together.
    ///
    /// `gpus` are the GPUs that this rank uses. By default these are the visible GPUs; GPUs visible to several ranks
    /// are divided evenly. A failure of one rank makes the call fail on all ranks: that rank gets its own error, the
    /// others get `rank_failed` with the reason. Throws `argument_error`, `not_supported`, `rank_failed`.
    node(const context &ctx, std::uint32_t rank, std::uint32_t ranks, allgather gather,
         array_view<const mpgpu::device> gpus = {}, on_error failed = {})
        : rank_(rank), ranks_(ranks), gather_(std::make_unique<allgather>(std::move(gather))) {
        make(ctx, rank, ranks, call, nullptr, gpus, failed);
    }
    /// Creates a node whose ranks have no allgather function. The ranks connect to each other through a Unix socket at
    /// `path`. All ranks pass the same path, in a directory that all of them may write to. They wait for each other for
    /// at most one minute. Throws the exceptions of the constructor above.
    node(const context &ctx, std::uint32_t rank, std::uint32_t ranks, const std::string &socket,
         array_view<const mpgpu::device> gpus = {}, on_error failed = {})
        : rank_(rank), ranks_(ranks) {
        make(ctx, rank, ranks, nullptr, socket.c_str(), gpus, failed);
    }
    /// Creates a node that consists of this process only.
    explicit node(const context &ctx, on_error failed = {}) : ranks_(1) {
        failed.report(mp_node_create(ctx.get(), 0, 1, nullptr, nullptr, nullptr, handle_.address()));
    }

    /// Plans all transfers between the ranks in one step. Collective: each rank passes its windows and the transfers
    /// that it sends or receives.
    ///
    /// `mpgpu::plan::enqueue` then enqueues this rank's part of a step. Every rank executes every step. See
    /// `mp_node_plan`; `mp_plan_destroy` describes the errors of ranks that have enqueued more steps than a rank that
    /// destroys its plan. Throws `argument_error`, `not_supported`, `out_of_memory`, `rank_failed`.
    [[nodiscard]] mpgpu::plan plan(array_view<const window> windows, array_view<const node_transfer> transfers,
                                   const plan_options &options = {}, on_error failed = {}) const {
        mpgpu::plan made;
        const mp_plan_options_t c = detail::c_options(options);
        failed.report(mp_node_plan(get(), windows.data(), windows.size(), transfers.data(), transfers.size(), nullptr,
                                   &c, made.handle_.address()));
        return made;
    }

    /// Plans transfers that move in partitions, each as soon as it is ready, while the rest is still being produced. A
    /// step consists of `plan::arm`, the producers, and `plan::enqueue`; see `mp_plan_arm`. Throws the exceptions of
    /// the other overload of `plan`.
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

    /// Plans the transfers that send and receive descriptors define. Descriptors are for ranks that do not know the
    /// position of the bytes in the other rank's memory. Collective.
    ///
    /// Sends match receives by source, destination and tag, in the order in which each rank passes them. Window `i` is
    /// the memory of descriptor `i`. Throws the exceptions of `plan`, and `argument_error` if a descriptor has no match
    /// or differs in size from its match.
    [[nodiscard]] mpgpu::plan plan_exchange(array_view<const half_transfer> halves, const plan_options &options = {},
                                            on_error failed = {}) const {
        const auto [windows, transfers] = named(halves);
        return plan(windows, transfers, options, failed);
    }
    /// Plans the transfers that send and receive descriptors define, and divides them into partitions.
    /// `plan::trigger(rank(), i)` returns the trigger for descriptor `i`. With one partition each, a receiver can check
    /// which of its messages has arrived (`trigger::arrived(0)`).
    [[nodiscard]] mpgpu::plan plan_exchange(array_view<const half_transfer> halves, const partitioning &how,
                                            const plan_options &options = {}, on_error failed = {}) const {
        const auto [windows, transfers] = named(halves);
        return plan(windows, transfers, how, options, failed);
    }

    /// Finds the fastest partitioning of transfers by trial, on all ranks together. `produce` launches the producers of
    /// a step in a stream. It receives the triggers (kernel arguments, see mpgpu/trigger.cuh) of the transfers that
    /// this rank passed; this rank must send all of them. An exception thrown by `produce` ends the call. Destinations
    /// are overwritten. See `mp_node_tune_partitions`. Throws the exceptions of `plan`.
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

    /// Joins the current or next collective call of the other ranks as a failed rank. That call then fails on them with
    /// `rank_failed` and `reason`. Use it on a rank that cannot make the call itself. Throws `rank_failed`.
    void fail(const std::string &reason, on_error failed = {}) const {
        failed.report(mp_node_fail(get(), reason.c_str()));
    }

    /// Returns the rank of this process in the node.
    [[nodiscard]] int rank() const noexcept { return static_cast<int>(rank_); }
    /// Returns the number of ranks in the node, even if the communicator of an `mpi::node` contains more. 0 if the node
    /// is empty.
    [[nodiscard]] int size() const noexcept { return static_cast<int>(ranks_); }
    /// Returns the first GPU that this rank uses. Throws `argument_error` if there is none, because there are more
    /// ranks than GPUs or another rank has listed the same GPU.
    [[nodiscard]] mpgpu::device device(on_error failed = {}) const {
        std::int32_t id = MP_DEVICE_HOST;
        failed.report(mp_node_device(get(), &id));
        return mpgpu::device::from_id(id);
    }
    /// Returns the GPUs that this rank uses: those that it passed to the constructor, otherwise those visible GPUs that
    /// were assigned to it. If several ranks list the same GPU, the rank with the fewest GPUs so far uses it. Empty if
    /// there are fewer GPUs than ranks. Throws `argument_error` if the node is empty.
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
    /// Returns the C handle, which this object still owns.
    [[nodiscard]] mp_node_t get() const noexcept { return handle_.get(); }
    /// True if this object owns a node.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    /// Callback for tuning, and the exception that it has thrown.
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
            produce(triggers, stream_view(stream)); // ends the process if it fails
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
            // Numbers of ranks on other nodes, and `any_rank`, are further below; the library rejects them by name.
            const bool is_none = half.rank < 0 && half.rank > MP_FIRST_ELSEWHERE;
            made.second.push_back(is_none        ? node_transfer{own, own, 0} // keeps the indices of the others
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
    std::unique_ptr<allgather> gather_; ///< the library holds its address
    detail::handle<mp_node_t, detail::destroyed_by<mp_node_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_NODE_HPP
