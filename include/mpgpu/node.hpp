// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_NODE_HPP
#define MPGPU_NODE_HPP

/// @file
/// Ranks of a node that plan together, each in a process of its own: `node`. `mpi::node` of mpgpu/mpi.hpp is one that
/// is made from a communicator.
///
/// @code
/// mpgpu::node node(ctx, rank, ranks, "/tmp/meeting");                // collective
/// mpgpu::plan halo = node.plan_exchange({mpgpu::send_to(right, tag, edge), mpgpu::receive_from(left, tag, ghost)});
/// halo.enqueue(stream);                                              // every time step, each rank its part
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

/// Memory of a rank that transfers of a node's plan may name. The C struct.
using window = mp_window_t;

/// A copy between windows of two ranks, or of one: destination, source (each a `node_end`), bytes. The C struct.
using node_transfer = mp_node_transfer_t;

/// An end of a `node_transfer`: the byte `offset` of window `index` of those that a rank hands in.
[[nodiscard]] constexpr mp_node_end_t node_end(int rank, std::uint32_t index, std::uint64_t offset = 0) noexcept {
    return {static_cast<std::uint32_t>(rank), index, offset};
}

/// What a rank sends to another, or receives from it, without knowing where the other keeps it: `send_to` and
/// `receive_from` make it.
struct half_transfer {
    window memory;     ///< this rank's bytes
    int rank;          ///< the other rank; nothing is moved if it is below 0, as `MPI_PROC_NULL`
    std::uint64_t tag; ///< the same in both halves
    bool is_send;      ///< whether the other rank receives them
};

namespace detail {

/// Fails to compile for memory that no half-transfer takes, and says what to pass.
template <class Memory> constexpr void refuse_memory_of_half() noexcept {
    static_assert(is_end<Memory>, "mpgpu: a half-transfer takes a buffer or a device_span: other ranks cannot reach a "
                                  "std::vector or an array. Copy it into a buffer of the GPU, or into one of "
                                  "buffer<T>::shared(ctx, device::host(), size)");
    static_assert(!is_end<Memory>, "mpgpu: receive_from writes: pass a buffer or a device_span that is not const");
}

/// Collects `count` values of every rank of a node, in the order of ranks. All ranks call it together, with the same
/// `call`, by which errors name it. Throws `rank_failed` if ranks are in different calls.
template <class T>
[[nodiscard]] std::vector<T> of_all_ranks(mp_node_t node, std::size_t ranks, const char *call, const T *mine,
                                          std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(ranks * count);
    on_error().report(mp_node_allgather(node, call, mine, all.data(), count * sizeof(T)));
    return all;
}

/// Returns when all ranks of a node have called it, with the same `call`. Throws as `of_all_ranks` does.
inline void meet_all_ranks(mp_node_t node, const char *call) {
    on_error().report(mp_node_allgather(node, call, nullptr, nullptr, 0));
}

} // namespace detail

/// All bytes of a span to a rank of the node, which hands in `receive_from` with this rank and the same tag.
template <class T> [[nodiscard]] half_transfer send_to(int rank, std::uint64_t tag, device_span<T> elements) noexcept {
    // They are only read. NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    return {{const_cast<std::remove_const_t<T> *>(elements.data()), elements.size_bytes()}, rank, tag, true};
}
/// The same of a buffer.
template <class T> [[nodiscard]] half_transfer send_to(int rank, std::uint64_t tag, const buffer<T> &whole) noexcept {
    return send_to(rank, tag, device_span<const T>(whole));
}
/// Does not compile: other memory is out of reach of other ranks.
template <class Memory, std::enable_if_t<!detail::is_end<const Memory>, int> = 0>
[[nodiscard]] half_transfer send_to(int rank, std::uint64_t tag, const Memory & /*memory*/) noexcept {
    detail::refuse_memory_of_half<Memory>();
    return {{nullptr, 0}, rank, tag, true};
}
/// All bytes of a span from a rank of the node, which hands in `send_to` with this rank, the same tag and as many
/// bytes.
template <class T>
[[nodiscard]] half_transfer receive_from(int rank, std::uint64_t tag, device_span<T> elements) noexcept {
    static_assert(!std::is_const_v<T>, "mpgpu: what is received is written");
    return {{elements.data(), elements.size_bytes()}, rank, tag, false};
}
/// The same of a buffer.
template <class T> [[nodiscard]] half_transfer receive_from(int rank, std::uint64_t tag, buffer<T> &whole) noexcept {
    return receive_from(rank, tag, device_span<T>(whole));
}
/// Does not compile: other memory is out of reach of other ranks, and constant memory is not written.
template <class Memory,
          std::enable_if_t<!detail::is_end<Memory> || std::is_const_v<std::remove_reference_t<Memory>>, int> = 0>
[[nodiscard]] half_transfer receive_from(int rank, std::uint64_t tag, Memory && /*memory*/) noexcept {
    detail::refuse_memory_of_half<Memory>();
    return {{nullptr, 0}, rank, tag, false};
}

/// Who moves partitions that are ready.
enum class agent : std::int32_t {
    automatic = MP_AGENT_AUTO,          ///< what the library chooses
    copy_engine = MP_AGENT_COPY_ENGINE, ///< copy engines, over all paths, without a multiprocessor
    producer = MP_AGENT_PRODUCER,       ///< the producing kernels: they store their bytes at the destination
};

/// How transfers move in partitions.
struct partitioning {
    std::uint32_t count = 0;        ///< partitions of each transfer; 0 for as many as the model finds best
    agent mover = agent::automatic; ///< who moves those that are ready
    bool arrivals = true;           ///< whether receivers are told of each arrival
    bool stores =
        false; ///< whether `agent::automatic` may have the producers store, which write where their trigger points
};

/// What `node::tune_partitions` tries.
struct partition_tuning {
    /// Who may move partitions: with `agent::producer` the kernel writes where the trigger points; `agent::automatic`
    /// only where `arrivals` is false.
    std::vector<agent> agents{agent::copy_engine};
    std::uint32_t rounds = 0; ///< timed steps of each candidate; 0 for 7
    bool arrivals = true;     ///< whether receivers are told of each arrival
    std::string file{};       ///< where the trials are kept; empty for the file of MPGPU_TUNING_FILE
    std::uint32_t blocks = 0; ///< of the kernel, where the program tunes with several numbers of them
};

/// All bytes of a span.
template <class T> [[nodiscard]] window make_window(device_span<T> elements) noexcept {
    return {elements.data(), elements.size_bytes()};
}
/// All bytes of a buffer; none where it is empty.
template <class T> [[nodiscard]] window make_window(buffer<T> &whole) noexcept {
    return make_window(device_span<T>(whole));
}

/// The ranks of a node, which plan together. Owns it, and is move-only.
class node {
  public:
    /// Collects `bytes` bytes of every rank at every rank, in the order of ranks, as `MPI_Allgather` does. Returns 0,
    /// or another number when it has failed. Must not throw.
    using allgather = std::function<int(const void *send, void *receive, std::size_t bytes)>;

    /// No node: every call reports `status::invalid_handle`.
    node() noexcept = default;

    /// A node of `ranks` ranks, of which this is `rank`. `gpus` are those that this rank works for; left out, those
    /// that it sees, shared out evenly where several ranks see them. All ranks make it together. What fails on one rank
    /// fails on all: there with its own error, on the others with `rank_failed` and the reason. Throws
    /// `argument_error`, `not_supported`, `rank_failed`.
    node(const context &ctx, std::uint32_t rank, std::uint32_t ranks, allgather gather,
         array_view<const device> gpus = {}, on_error failed = {})
        : rank_(rank), ranks_(ranks), gather_(std::make_unique<allgather>(std::move(gather))) {
        make(ctx, rank, ranks, call, nullptr, gpus, failed);
    }
    /// The same where the ranks have no allgather: they meet at a socket, whose path is the same on all, in a folder
    /// that they all may write to, and wait a minute for each other. Throws as above.
    node(const context &ctx, std::uint32_t rank, std::uint32_t ranks, const std::string &socket,
         array_view<const device> gpus = {}, on_error failed = {})
        : rank_(rank), ranks_(ranks) {
        make(ctx, rank, ranks, nullptr, socket.c_str(), gpus, failed);
    }
    /// A node of this process alone.
    explicit node(const context &ctx, on_error failed = {}) : ranks_(1) {
        failed.report(mp_node_create(ctx.get(), 0, 1, nullptr, nullptr, nullptr, handle_.address()));
    }

    /// Plans what all ranks move in a step, together: each hands in its windows, and the transfers that it sends or
    /// receives. Collective. `mpgpu::plan::enqueue` then enqueues this rank's part of a step; every rank executes every
    /// step. `mp_node_plan` says more, and `mp_plan_destroy` what ranks get that have come further than one that
    /// destroys its plan. Throws `argument_error`, `not_supported`,
    /// `out_of_memory`, `rank_failed`.
    [[nodiscard]] mpgpu::plan plan(array_view<const window> windows, array_view<const node_transfer> transfers,
                                   const plan_options &options = {}, on_error failed = {}) const {
        mpgpu::plan made;
        const mp_plan_options_t c = detail::c_options(options);
        failed.report(mp_node_plan(get(), windows.data(), windows.size(), transfers.data(), transfers.size(), nullptr,
                                   &c, made.handle_.address()));
        return made;
    }

    /// The same with transfers that move in partitions, each as soon as it is ready, while the rest is being produced:
    /// `plan::arm`, then what produces them, then `plan::enqueue` make a step. `mp_plan_arm` says more. Throws as
    /// above.
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

    /// The same for ranks that know what they send and receive, and not where the other keeps it, as with MPI. Halves
    /// of two ranks meet by both ranks and the tag, several of one kind in the order in which each rank hands them in.
    /// Window `i` is the memory of half `i`. Collective. Throws as above; `argument_error` for a half that meets none,
    /// or one of another size.
    [[nodiscard]] mpgpu::plan plan_exchange(array_view<const half_transfer> halves, const plan_options &options = {},
                                            on_error failed = {}) const {
        const auto [windows, transfers] = named(halves);
        return plan(windows, transfers, options, failed);
    }
    /// The same with transfers that move in partitions. `plan::trigger(rank(), i)` is of half `i`, so with one
    /// partition each a receiver asks which of its messages has arrived (`trigger::arrived(0)`).
    [[nodiscard]] mpgpu::plan plan_exchange(array_view<const half_transfer> halves, const partitioning &how,
                                            const plan_options &options = {}, on_error failed = {}) const {
        const auto [windows, transfers] = named(halves);
        return plan(windows, transfers, how, options, failed);
    }

    /// Finds the best partitioning of these transfers by trying, on all ranks together: `produce` launches the
    /// producers of a step in a stream, given the triggers of the transfers that this rank has handed in, all of which
    /// it sends. Its exceptions end the call. Destinations are overwritten. `mp_node_tune_partitions` says more. Throws
    /// as `plan` does.
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

    /// Takes part in the call in which the other ranks are, or to which they come next, as a rank that has failed: it
    /// fails on them with `rank_failed` and `reason`. For a rank that cannot make the call. Throws `rank_failed`.
    void fail(const std::string &reason, on_error failed = {}) const {
        failed.report(mp_node_fail(get(), reason.c_str()));
    }

    /// Which of the node's ranks this is.
    [[nodiscard]] int rank() const noexcept { return static_cast<int>(rank_); }
    /// How many ranks the node has, also where a communicator has more (`mpi::node`); 0 of an empty object.
    [[nodiscard]] int size() const noexcept { return static_cast<int>(ranks_); }
    /// The GPUs that this rank works for: those that it has named, else its share of what the ranks see; of ranks that
    /// name the same GPU the first works for it. Throws `argument_error` for an empty object.
    [[nodiscard]] std::vector<device> devices(on_error failed = {}) const {
        std::size_t count = 0;
        failed.report(mp_node_devices(get(), nullptr, 0, &count));
        std::vector<std::int32_t> ids(count);
        failed.report(mp_node_devices(get(), ids.data(), ids.size(), &count));
        std::vector<device> found;
        found.reserve(ids.size());
        for (const std::int32_t id : ids) {
            found.push_back(device::from_id(id));
        }
        return found;
    }
    /// The C handle, still owned by this object.
    [[nodiscard]] mp_node_t get() const noexcept { return handle_.get(); }
    /// Whether this owns a node.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    /// What tuning calls, and what that has thrown.
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
            produce(triggers, stream_view(stream)); // ends the process where it fails
#endif
            return thrown ? 1 : 0;
        }
    };

    void make(const context &ctx, std::uint32_t rank, std::uint32_t ranks, mp_allgather_t gather, const char *socket,
              array_view<const device> gpus, on_error failed) {
        std::vector<std::int32_t> ids;
        for (const device gpu : gpus) {
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
            // Numbers of ranks on other nodes, and `any_rank`, lie further below: the library refuses them by name.
            const bool is_none = half.rank < 0 && half.rank > MP_FIRST_ELSEWHERE;
            made.second.push_back(is_none        ? node_transfer{own, own, 0} // keeps the numbers of the others
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
    std::unique_ptr<allgather> gather_; ///< its address is the library's
    detail::handle<mp_node_t, detail::destroyed_by<mp_node_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_NODE_HPP
