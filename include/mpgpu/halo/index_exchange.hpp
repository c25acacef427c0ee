// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_INDEX_EXCHANGE_HPP
#define MPGPU_HALO_INDEX_EXCHANGE_HPP

/// @file
/// Exchanges by index lists. Part of mpgpu/halo_indexed.hpp; include that header.

#include <mpgpu/halo/departure.hpp>
#include <mpgpu/halo/index_arrays.hpp>
#include <mpgpu/halo/index_messages.hpp>
#include <mpgpu/halo/index_pairs.hpp>
#include <mpgpu/halo/processes.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mpgpu::halo {

/// Object that exchanges entries of vectors between the ranks of a communicator. Index lists name the entries. Each
/// rank is a process. The object is created once, and each exchange names its vectors.
///
/// Neighbours on this node: the kernel exchanges the entries. The constructor, `destroy` and the destructor block. The
/// other functions do not.
///
/// Neighbours on other nodes: MPI exchanges messages in host memory. `start` blocks until the entries are gathered, and
/// `finish` blocks until the messages have arrived. MPI must allow calls from the threads that call these functions.
///
/// All ranks execute the same exchanges in the same order, with the same operations. They pass the same number of
/// fields with the same entry sizes. Exchanges run one after the other, even in different streams.
///
/// Graphs: in a stream that is being captured, an exchange becomes part of the graph. All ranks must capture the same
/// exchanges and launch the graphs in the same order. In a capture, all exchanges must be enqueued in one stream. Only
/// `start` and `finish` of the same exchange may use different streams; the stream of the next exchange must then wait
/// for the stream of `finish`.
///
/// The context must outlive the object, and the vectors must exist until the exchanges have finished. The object owns
/// message buffers and events. It is move-only. The destructor blocks until all enqueued work has finished. Several
/// threads must not use an object at the same time.
class indexed {
  public:
    /// Constructs an empty object. Of an empty object, `entries`, `sent` and `received` return 0, and `operator bool`
    /// returns false. `destroy` and the functions that exchange throw `argument_error`.
    indexed() noexcept = default;

    /// Creates an exchange object. Collective over the communicator from which `node` was created. `where` is the GPU
    /// of the vectors, and `entries` the length of the vectors of this rank, in entries. `neighbours` are the ranks
    /// with which this rank exchanges entries. A rank may occur at most once. If a rank sends an entry to another, each
    /// must list the other. All lists are copied.
    ///
    /// If one rank cannot create the object, all ranks throw. They throw `argument_error` if an index is out of range,
    /// if an entry occurs twice in the receive lists, or if a send list and the corresponding receive list of the
    /// neighbour have different lengths. They throw `not_supported` if the memory of a neighbour on this node cannot be
    /// mapped, or if `index_options::kernel` is empty on the CUDA backend.
    indexed(const context &ctx, const mpi::node &node, device where, std::size_t entries,
            array_view<const index_neighbour> neighbours, const index_options &how = {})
        : indexed(make(ctx, node, where, entries, neighbours, how)) {}

    /// Blocks until the exchanges have finished, and frees the resources. The object is then empty. It may be destroyed
    /// or assigned to. All ranks of the communicator must call it before MPI_Finalize. The call waits for the ranks of
    /// this node. Throws `peer_gone` if one of them has exited, and `driver_error` if the GPU driver fails.
    void destroy() {
        check_made();
        indexed whole = std::move(*this); // `whole` is destroyed at the end of this function
        whole.own_->end.synchronize();
        if (whole.own_->messages) {
            whole.own_->messages->close();
        }
        whole.own_->leaving.reset();
        whole.own_->others->barrier(); // after this, no rank writes to memory of another rank
        whole.own_->others->unmap();
        whole.own_->others->barrier(); // after this, no rank has mapped memory of another rank
    }

    /// Enqueues an exchange of up to `most_fields` fields after all earlier work in `stream` and before all later work.
    /// Blocks only if this rank has neighbours on other nodes. `stream` is a stream of the object's device.
    ///
    /// Throws `argument_error` if the fields are not valid; nothing is enqueued then. Throws `peer_gone` if a neighbour
    /// has exited, and `timeout` if neighbours on other nodes exceed `index_options::time_limit`. Throws
    /// `not_supported` if the stream is being captured and this rank has neighbours on other nodes. Throws
    /// `driver_error` if the GPU driver fails.
    void exchange(stream_view stream, array_view<const index_field> fields,
                  index_operation operation = index_operation::copy) {
        if (calls_mpi()) {
            start(stream, fields, operation);
            finish(stream);
            return;
        }
        enqueue(stream, checked(fields, operation));
    }
    /// Enqueues an exchange of one field.
    void exchange(stream_view stream, const index_field &field, index_operation operation = index_operation::copy) {
        exchange(stream, array_view<const index_field>(&field, 1), operation);
    }
    /// Enqueues an exchange of one vector: a `buffer` or a `device_span`. Each element is an entry.
    template <class Elements, std::enable_if_t<mpgpu::detail::is_end<Elements>, int> = 0>
    void exchange(stream_view stream, Elements &&elements, index_operation operation = index_operation::copy) {
        exchange(stream, field_of(elements), operation);
    }

    /// Enqueues an exchange with the operation `index_operation::reverse_add`: the entries of the receive lists are
    /// sent back, and are added to the entries of the send lists. Throws the exceptions of `exchange`.
    void add(stream_view stream, array_view<const index_field> fields) {
        exchange(stream, fields, index_operation::reverse_add);
    }
    /// Enqueues an exchange of one field with the operation `index_operation::reverse_add`.
    void add(stream_view stream, const index_field &field) { exchange(stream, field, index_operation::reverse_add); }
    /// Enqueues an exchange of one vector, a `buffer` or a `device_span`, with the operation
    /// `index_operation::reverse_add`. Each element is an entry.
    template <class Elements, std::enable_if_t<mpgpu::detail::is_end<Elements>, int> = 0>
    void add(stream_view stream, Elements &&elements) {
        add(stream, field_of(elements));
    }

    /// Starts an exchange after all earlier work in `stream`: enqueues a kernel that gathers the entries and sends
    /// them. Later work in `stream` does not wait for other ranks.
    ///
    /// The exchange reads the entries before later work in `stream` begins, and writes entries only in `finish`. Later
    /// work may therefore write to all entries. `finish` stores the received values to the entries, or adds them to the
    /// values that the entries then have.
    ///
    /// Throws the exceptions of `exchange`. Throws `argument_error` if another exchange was started and not finished.
    void start(stream_view stream, array_view<const index_field> fields,
               index_operation operation = index_operation::copy) {
        detail::index_call call = checked(fields, operation);
        call.scatters = false;
        if (calls_mpi()) {
            own_->messages->check_usable();
        }
        enqueue(stream, call);
        if (calls_mpi()) {
            own_->end.synchronize(); // MPI is not ordered by streams
            own_->messages->start(call);
        }
        own_->started = call;
    }
    /// Starts an exchange of one field.
    void start(stream_view stream, const index_field &field, index_operation operation = index_operation::copy) {
        start(stream, array_view<const index_field>(&field, 1), operation);
    }
    /// Starts an exchange of one vector: a `buffer` or a `device_span`. Each element is an entry.
    template <class Elements, std::enable_if_t<mpgpu::detail::is_end<Elements>, int> = 0>
    void start(stream_view stream, Elements &&elements, index_operation operation = index_operation::copy) {
        start(stream, field_of(elements), operation);
    }

    /// Finishes the exchange that was started: enqueues a kernel that waits for the messages and scatters or adds them,
    /// after all earlier work in `stream` and before all later work. The fields are those of `start`. Throws the
    /// exceptions of `exchange`, and `argument_error` if no exchange was started.
    void finish(stream_view stream) {
        check_made();
        if (!own_->started) {
            detail::fail(detail::invalid("stream", "no exchange was started: call start before finish"));
        }
        detail::index_call call = *own_->started;
        own_->started.reset();
        if (calls_mpi()) {
            own_->messages->wait();
        }
        call.gathers = false;
        call.scatters = true;
        enqueue(stream, call);
    }

    /// Returns true if the object is not empty.
    explicit operator bool() const noexcept { return own_ != nullptr; }
    /// Returns the length of the vectors, in entries.
    [[nodiscard]] std::size_t entries() const noexcept { return own_ ? own_->entries : 0; }
    /// Returns the number of entries that this rank sends in an exchange, including those to itself. With
    /// `index_operation::reverse_add`, it receives this number of entries.
    [[nodiscard]] std::uint64_t sent() const noexcept { return own_ ? own_->sent : 0; }
    /// Returns the number of entries that this rank receives in an exchange, including those from itself. With
    /// `index_operation::reverse_add`, it sends this number of entries.
    [[nodiscard]] std::uint64_t received() const noexcept { return own_ ? own_->received : 0; }

  private:
    using ranks = detail::processes<mpi::node>;

    explicit indexed(const context &ctx) : own_(std::make_unique<resources>(ctx)) {}

    static indexed make(const context &ctx, const mpi::node &node, device where, std::size_t entries,
                        array_view<const index_neighbour> neighbours, const index_options &how) {
        if (!node) {
            mpgpu::detail::fail_empty("node"); // MPI aborts the program if the communicator is null
        }
        // If another rank is in a different collective call, all ranks get an error.
        mpgpu::detail::meet_all_ranks(node.get(), "halo::indexed");
        const auto check = [](std::optional<error_details> found) {
            if (found) {
                detail::fail(std::move(*found));
            }
        };
        const auto all = [&node](const auto &step) { ranks::together(node, step, "neighbours"); };
        all([&] {
            check(detail::wrong(node, where, entries, neighbours, how));
            static_cast<void>(mpi::uuid_of(ctx, where)); // throws if there is no such device
        });
        const detail::index_pairs pairs(node, neighbours, how.entry_bytes);
        all([&] { check(pairs.wrong(node.communicator_rank())); });
        const int sharing = detail::ranks_sharing(ctx, where, node.communicator());
        mpi::detail::communicator own; // communicator for messages to other nodes
        if (!ranks::is_one_node(node)) {
            mpi::detail::check(MPI_Comm_dup(node.everyone(), own.address()), "MPI_Comm_dup");
        }
        std::optional<indexed> made;
        all([&] {
            made.emplace(indexed(ctx));
            made->allocate(ctx, node, where, entries, pairs);
            if (own.get() != MPI_COMM_NULL) {
                made->own_->messages = std::make_unique<detail::index_messages>(ctx, node, pairs, how, std::move(own));
            }
        });
        made->own_->others->gone_there = node.exchange(made->own_->others->gone);
        made->own_->others->inboxes = node.exchange<std::byte>({device_span<std::byte>(made->own_->inbox)}, where);
#if MPGPU_EXCEPTIONS
        try {
#endif
            all([&] { made->connect(ctx, node, pairs, sharing, how); });
#if MPGPU_EXCEPTIONS
        } catch (...) {
            made->own_->others->unmap();
            made->own_->others->barrier(); // after this, no rank has mapped memory of another rank
            throw;
        }
#endif
        return std::move(*made);
    }

    /// Allocates the inbox and the counter that is set when a rank exits.
    void allocate(const context &ctx, const mpi::node &node, device where, std::size_t entries,
                  const detail::index_pairs &pairs) {
        own_->where = where;
        own_->entries = entries;
        own_->entry_bytes = static_cast<std::size_t>(pairs.entry_bytes);
        own_->others = std::make_unique<ranks::of_others>(node, "halo::indexed::destroy");
        own_->others->gone = signal_counters(ctx, 1);
        own_->inbox = memory::shared(ctx, where, static_cast<std::size_t>(pairs.inbox_bytes));
        ranks::clear(ctx, own_->inbox, 2 * pairs.half, stream(ctx, where));
    }

    /// Sets the addresses of all messages, and creates the kernel.
    void connect(const context &ctx, const mpi::node &node, const detail::index_pairs &pairs, int sharing,
                 const index_options &how) {
        detail::index_arrays arrays(pairs.neighbours, own_->entries, own_->entry_bytes, how.first_index);
        arrays.gone = own_->others->gone.data();
        std::vector<std::uint64_t *> there;
        for (std::size_t m = 0; m < pairs.neighbours.size(); ++m) {
            const int rank = pairs.neighbours[m].rank;
            if (!node.contains(rank)) {
                own_->messages->place(arrays.messages[m], rank);
                continue;
            }
            const detail::index_offer &own = pairs.own[static_cast<std::size_t>(rank)];
            const detail::index_offer &other = pairs.offers[static_cast<std::size_t>(rank)];
            std::byte *const here = own_->inbox.data();
            std::byte *to = here;
            if (rank != node.communicator_rank()) {
                to = ranks::mapped(own_->others->inboxes, rank, other.bytes).in_kernels();
                there.push_back(ranks::mapped(own_->others->gone_there, rank, sizeof(std::uint64_t)).data());
            }
            detail::index_message &message = arrays.messages[m];
            message.there = to + other.offset;
            message.there_half = other.half;
            message.there_flag = reinterpret_cast<std::uint64_t *>(to + other.flag_offset);
            message.here = here + own.offset;
            message.here_half = own.half;
            message.here_flag = reinterpret_cast<std::uint64_t *>(here + own.flag_offset);
        }
        own_->sent = arrays.sends.back();
        own_->received = arrays.receives.back();
        own_->leaving = std::make_unique<detail::departure>(ctx.get(), own_->others->gone.data(), std::move(there));
        own_->launch = kernel_of(ctx, how)(ctx, own_->where, arrays, sharing);
    }

    /// Returns the function that creates the kernel.
    static index_kernel kernel_of(const context &ctx, const index_options &how) {
        if (how.kernel) {
            return how.kernel;
        }
        if (ctx.backend() != backend::host) {
            detail::fail(detail::refusal(status::not_supported, "how",
                                         "halo::indexed needs a kernel on the CUDA backend: set index_options::kernel "
                                         "to mpgpu::halo::cuda_indexed() of mpgpu/halo.cuh, in a source that nvcc "
                                         "compiles"));
        }
        return detail::cpu_indexed();
    }

    /// Returns true if this rank has neighbours on other nodes.
    [[nodiscard]] bool calls_mpi() const noexcept {
        return own_ && own_->messages && own_->messages->has_peers();
    }

    void check_made() const {
        if (!*this) {
            mpgpu::detail::fail_empty("indexed");
        }
    }

    /// Returns the arguments of a launch for the given fields. Throws if they are not valid.
    [[nodiscard]] detail::index_call checked(array_view<const index_field> fields, index_operation operation) const {
        check_made();
        if (own_->started) {
            detail::fail(detail::invalid("stream", "an exchange was started and not finished: call finish first"));
        }
        std::optional<error_details> found =
            detail::wrong(fields, own_->where, own_->entries, own_->entry_bytes, operation);
        if (found) {
            detail::fail(std::move(*found));
        }
        return detail::call_of(fields, operation);
    }

    /// Launches the kernel of an exchange, or of a part of it, after the previous launch.
    void enqueue(stream_view stream, const detail::index_call &call) {
        std::int32_t of = MP_DEVICE_HOST;
        std::int32_t capturing = 0;
        detail::check(mp_stream_get_info(own_->context, stream.get(), &of, &capturing));
        if (of != MP_DEVICE_HOST && of != own_->where.id()) {
            detail::fail(detail::invalid("stream", "a stream of device " + std::to_string(of) +
                                                       ": the halo::indexed object was created for device " +
                                                       std::to_string(own_->where.id()) +
                                                       "; pass a stream of that device"));
        }
        const bool is_captured = capturing != 0;
        if (is_captured && calls_mpi()) {
            detail::fail(detail::refusal(status::not_supported, "stream",
                                         "an exchange with ranks on other nodes cannot be captured: MPI sends its "
                                         "messages, and calls of MPI cannot be part of a graph"));
        }
        own_->leaving->expect(is_captured, own_->leaving->exchanges + (call.gathers ? 1 : 0));
        // All exchanges of a capture are in one stream, which orders them. `start` and `finish` of an exchange may be
        // in different streams, so `finish` waits for the event of `start`.
        event &end = is_captured ? own_->captured_end : own_->end;
        if (!is_captured || !call.gathers) {
            detail::check(mp_stream_wait_event(own_->context, stream.get(), end.get()));
        }
        own_->launch(stream, call);
        if (call.gathers && !is_captured) {
            ++own_->leaving->exchanges;
        }
        end.record(stream);
    }

    /// Resources of the object. The members are destroyed in reverse order: other ranks are notified first.
    struct resources {
        explicit resources(const context &ctx) : context(ctx.get()), end(ctx), captured_end(ctx) {}

        mp_context_t context;
        device where = device::host();
        std::size_t entries = 0;
        std::size_t entry_bytes = 0;
        std::uint64_t sent = 0;
        std::uint64_t received = 0;
        std::unique_ptr<ranks::of_others> others;         ///< mapped memory of other ranks
        memory inbox;                                     ///< messages that arrive, in two halves, and their flags
        std::unique_ptr<detail::index_messages> messages; ///< messages to ranks on other nodes; null on a single node
        event end;                                        ///< end of the last launch
        event captured_end;                               ///< end of the last launch in a capture
        index_launch launch;
        std::optional<detail::index_call> started;  ///< exchange that was started and is not finished
        std::unique_ptr<detail::departure> leaving; ///< notifies other ranks at destruction
    };

    std::unique_ptr<resources> own_; ///< null if the object is empty
};

} // namespace mpgpu::halo

#endif // MPGPU_HALO_INDEX_EXCHANGE_HPP
