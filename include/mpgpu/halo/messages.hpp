// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_MESSAGES_HPP
#define MPGPU_HALO_MESSAGES_HPP

/// @file
/// MPI messages to and from ranks on other nodes. Part of mpgpu/halo_mpi.hpp; include that header.

#include <mpgpu/halo/persistent.hpp>
#include <mpgpu/halo/plan.hpp>
#include <mpgpu/mpi.hpp>

#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h> // declares whether MPI is GPU-aware
#endif

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

/// Returns true if MPI reports that it can send and receive device memory.
[[nodiscard]] inline bool gpu_aware() {
#if defined(MPIX_CUDA_AWARE_SUPPORT)
    return MPIX_Query_cuda_support() == 1;
#else
    return false;
#endif
}

/// Returns the number of ranks of a communicator that use the same device as this rank. Collective.
[[nodiscard]] inline int ranks_sharing(const context &ctx, device where, MPI_Comm all) {
    int ranks = 0;
    mpi::detail::check(MPI_Comm_size(all, &ranks), "MPI_Comm_size");
    const mpi::device_uuid own = mpi::uuid_of(ctx, where);
    std::vector<mpi::device_uuid> uuids(static_cast<std::size_t>(ranks));
    const auto bytes = static_cast<int>(own.size());
    mpi::detail::check(MPI_Allgather(own.data(), bytes, MPI_BYTE, uuids.data(), bytes, MPI_BYTE, all), "MPI_Allgather");
    return static_cast<int>(std::count(uuids.begin(), uuids.end(), own));
}

/// Part of a message between two ranks that is sent as one MPI message. It contains some of the pieces (boxes of cells)
/// of the message.
struct message_part {
    std::uint64_t offset; ///< offset of the part in the message, bytes
    std::uint64_t bytes;
    std::size_t first_piece;
    std::size_t pieces;
};

/// Returns the parts in which the message between two ranks is sent. The result is equal on both ranks. Each part
/// contains pieces of about 32 KiB in total, so that the first parts of a large message are sent while others are
/// packed. If `in_parts` is false, returns one part.
[[nodiscard]] inline std::vector<message_part> parts_of(const rank_pair &p, bool in_parts) {
    constexpr std::uint64_t enough = 32768; // MPI sends this size in about the time of an empty message
    if (!in_parts) {
        return {{0, p.bytes, 0, 0}};
    }
    std::vector<message_part> parts = {{0, 0, 0, 0}};
    for (const region &r : p.packed) {
        if (parts.back().bytes >= enough) {
            const message_part &last = parts.back();
            parts.push_back({last.offset + last.bytes, 0, last.first_piece + last.pieces, 0});
        }
        parts.back().bytes += aligned(bytes_of(r), piece_alignment);
        ++parts.back().pieces;
    }
    return parts;
}

/// Clock of the time during which an exchange waits for other ranks.
///
/// The time between two polls counts only up to a sixteenth of the limit. A program that does not poll for a long time
/// therefore does not exceed the limit before MPI has had time to receive messages.
class wait_clock {
  public:
    using duration = std::chrono::nanoseconds;

    void restart() noexcept {
        waited_ = {};
        polled_ = std::chrono::steady_clock::now();
    }

    /// Returns true if the time since `restart` is at least `limit`. Called once per poll.
    [[nodiscard]] bool has_reached(duration limit) noexcept {
        constexpr int least_polls = 16;
        const auto now = std::chrono::steady_clock::now();
        const duration passed = now - std::exchange(polled_, now);
        waited_ += std::min(passed, limit / least_polls + duration(1));
        return waited_ >= limit;
    }

  private:
    duration waited_{};
    std::chrono::steady_clock::time_point polled_;
};

/// Returns a duration as text in the largest unit that divides it: "60 s", "1500 ms" or "1 ns".
[[nodiscard]] inline std::string text_of_time(std::chrono::nanoseconds time) {
    constexpr std::int64_t second = 1'000'000'000;
    constexpr std::int64_t millisecond = 1'000'000;
    const std::int64_t count = time.count();
    return count % second == 0        ? std::to_string(count / second) + " s"
           : count % millisecond == 0 ? std::to_string(count / millisecond) + " ms"
                                      : std::to_string(count) + " ns";
}

/// Returns a list of ranks as text: "rank 3", or "ranks 3, 5".
[[nodiscard]] inline std::string text_of_ranks(std::vector<int> ranks) {
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    std::string text = ranks.size() == 1 ? "rank" : "ranks";
    for (std::size_t i = 0; i < ranks.size(); ++i) {
        text += (i == 0 ? " " : ", ") + std::to_string(ranks[i]);
    }
    return text;
}

/// Calls `step()`. If it throws, sets `failed` to true and rethrows the exception.
template <class Step> void set_if_thrown([[maybe_unused]] bool &failed, const Step &step) {
#if MPGPU_EXCEPTIONS
    try {
        step();
    } catch (...) {
        failed = true;
        throw;
    }
#else
    step();                           // without exceptions, a failure ends the process
#endif
}

/// Persistent MPI requests for all messages to and from ranks on other nodes. They are created once, on their own
/// communicator.
class mpi_requests : public off_node {
  public:
    mpi_requests(const mpi_requests &) = delete;
    mpi_requests(mpi_requests &&) = delete;
    mpi_requests &operator=(const mpi_requests &) = delete;
    mpi_requests &operator=(mpi_requests &&) = delete;
    ~mpi_requests() override {
        int finalised = 0;
        if (MPI_Finalized(&finalised) == MPI_SUCCESS && finalised == 0) {
            bool sends = false;
            bool receives = false;
            for (std::size_t i = 0; i < requests_.size(); ++i) {
                if (has_ended(requests_[i])) {
                    static_cast<void>(MPI_Request_free(&requests_[i]));
                } else {
                    (i < received_.size() ? receives : sends) = true;
                }
            }
            // The buffers of requests that have not completed remain allocated until the context is destroyed, because
            // MPI may access them if the other rank makes progress later. Waiting for the requests would block forever
            // if the other rank has exited.
            for (const auto &[is_left, given] : {std::pair(sends, &given_out_), std::pair(receives, &given_in_)}) {
                if (is_left) {
                    static_cast<void>(std::make_unique<std::shared_ptr<memory>>(*given).release());
                }
            }
        }
        if (!may_free_) {
            messages_.keep();
        }
    }

    void close() noexcept override { may_free_ = !failed_; }

  protected:
    /// Description of one MPI send or receive. The data are in the rank's outbox or inbox (buffers of packed messages),
    /// or in their staging buffers in host memory.
    struct message {
        const rank_pair *of; ///< sending and receiving rank; valid only in constructors
        message_part part;
        int peer; ///< other rank
        int tag;  ///< MPI tag; identifies the part, because parts are sent in any order
        std::byte *box;
        std::byte *given;
    };

    /// Creates the MPI requests. `outbox` and `inbox` are the buffers of packed messages of this rank, on its device.
    /// If `in_parts` is true, large messages are sent in several parts. Collective over the ranks of the
    /// node's communicator.
    mpi_requests(const context &ctx, const mpi::node &node, const schedule &all, int rank, device where, bool in_parts,
                 const std::shared_ptr<memory> &outbox, const std::shared_ptr<memory> &inbox, const options &how)
        : time_limit_(how.time_limit), given_out_(outbox), given_in_(inbox) {
        mpi::detail::check(MPI_Comm_dup(node.everyone(), messages_.address()), "MPI_Comm_dup");
        if (how.persistent != persistent_form::none) {
            // This call is collective, so it precedes everything that can fail on one rank. The number includes ranks
            // of this machine that are treated as being on other nodes.
            sharing_ = ranks_sharing(ctx, where, messages_.get());
        }
        const bool staged = how.between_nodes == mpi_memory::staged || (how.between_nodes == mpi_memory::automatic &&
                                                                        ctx.backend() != backend::host && !gpu_aware());
        if (staged) {
            given_out_ = std::make_shared<memory>(ctx, device::host(), outbox->size());
            given_in_ = std::make_shared<memory>(ctx, device::host(), inbox->size());
        }
        end_ = memory(ctx, device::host(), 1);
        MPI_Datatype unit = MPI_DATATYPE_NULL; // MPI counts are ints, and messages may be larger than 2 GiB
        mpi::detail::check(MPI_Type_contiguous(static_cast<int>(piece_alignment), MPI_BYTE, &unit),
                           "MPI_Type_contiguous");
        mpi::detail::check(MPI_Type_commit(&unit), "MPI_Type_commit");
        for (const bool receives : {true, false}) {
            std::vector<message> &made = receives ? received_ : sent_;
            for (const rank_pair &p : all.pairs) {
                if (p.on_node || p.bytes == 0 || (receives ? p.to : p.from) != rank) {
                    continue;
                }
                std::byte *const box = (receives ? inbox : outbox)->data();
                std::byte *const given = (receives ? given_in_ : given_out_)->data();
                int tag = 0;
                for (const message_part &part : parts_of(p, in_parts)) {
                    const std::uint64_t offset = (receives ? p.inbox_offset : p.outbox_offset) + part.offset;
                    made.push_back({&p, part, receives ? p.from : p.to, tag++, box + offset, given + offset});
                }
            }
            // Short messages are packed first, so that MPI can start early.
            std::stable_sort(made.begin(), made.end(),
                             [](const message &a, const message &b) { return a.part.bytes < b.part.bytes; });
            for (const message &m : made) {
                add(receives, m, unit);
            }
        }
        mpi::detail::check(MPI_Type_free(&unit), "MPI_Type_free"); // the requests keep the type alive
    }

    [[nodiscard]] MPI_Request *receives() noexcept { return requests_.data(); }
    [[nodiscard]] MPI_Request *sends() noexcept { return requests_.data() + received_.size(); }
    [[nodiscard]] int count() const noexcept { return static_cast<int>(requests_.size()); }

    /// Throws if an earlier exchange has failed, because its MPI requests may still be active.
    void check_usable() const {
        if (failed_) {
            fail(refusal(status::rank_failed, "stream",
                         "an earlier exchange with ranks on other nodes has failed; create a new plan"));
        }
    }

    /// Begins another exchange.
    void begin() {
        may_free_ = false;
        now_ = {};
        now_.to_send = sent_.size();
        now_.to_receive = received_.size();
        completed_.resize(requests_.size());
    }

    /// Makes progress in MPI. Calls `arrived` with the index of each message that has arrived.
    template <class Arrived> void test(const Arrived &arrived) {
        if (requests_.empty()) {
            return; // MPI may refuse an empty list
        }
        int done = 0;
        mpi::detail::check(MPI_Testsome(count(), receives(), &done, completed_.data(), MPI_STATUSES_IGNORE),
                           "MPI_Testsome");
        for (int i = 0; done != MPI_UNDEFINED && i < done; ++i) {
            const auto request = static_cast<std::uint32_t>(completed_[static_cast<std::size_t>(i)]);
            if (request < received_.size()) {
                arrived(request);
                ++now_.received;
            } else {
                ++now_.sent;
            }
        }
    }

    /// Starts the clock of the time limit. Called when this rank starts its receives, after its stream has packed the
    /// messages or has started the persistent kernel.
    void count_time() noexcept {
        if (time_limit_) {
            clock_.restart();
        }
    }

    /// Throws `timeout` if the exchange has not ended within `options::time_limit`. The error names the ranks that this
    /// rank waits for.
    void check_time() {
        if (!time_limit_ || now_.is_done() || !clock_.has_reached(*time_limit_)) {
            return;
        }
        std::string why;
        const auto add = [&why](const std::string &text) { why += (why.empty() ? "" : "; ") + text; };
        for (const bool receives : {true, false}) {
            const std::vector<message> &messages = receives ? received_ : sent_;
            std::vector<int> ranks;
            for (std::size_t i = 0; i < messages.size(); ++i) {
                if (!is_inactive(requests_[receives ? i : received_.size() + i])) {
                    ranks.push_back(messages[i].peer);
                }
            }
            if (!ranks.empty()) {
                add((receives ? "messages have not arrived from " : "messages were not accepted by ") +
                    text_of_ranks(std::move(ranks)));
            }
        }
        if (now_.packed < now_.to_send) {
            add("this rank has packed " + std::to_string(now_.packed) + " of " + std::to_string(now_.to_send) +
                " messages");
        }
        fail(refusal(status::timeout, "time_limit",
                     "the halo exchange has not ended within options::time_limit, " + text_of_time(*time_limit_) +
                         ": " + why + "; end the lifetime of the plan without calling destroy()"));
    }

    /// Calls `step()`. If it throws, later exchanges are refused.
    template <class Step> void or_fail(const Step &step) { set_if_thrown(failed_, step); }

    std::vector<message> received_; ///< messages to receive, in the order of the requests
    std::vector<message> sent_;
    exchange_progress now_;
    bool failed_ = false; ///< true if an exchange has failed, so that its messages may still be in flight
    int sharing_ = 1;     ///< number of ranks that use this rank's device; set for persistent kernels

  private:
    void add(bool receives, const message &m, MPI_Datatype unit) {
        const std::uint64_t units = m.part.bytes / piece_alignment;
        if (units > static_cast<std::uint64_t>(std::numeric_limits<int>::max())) {
            fail(refusal(status::not_supported, "arrays",
                         "a message of " + std::to_string(m.part.bytes) +
                             " bytes to another node: the maximum is 32 GiB; exchange fewer variables in a plan"));
        }
        const auto number = static_cast<int>(units);
        MPI_Request &made = requests_.emplace_back(MPI_REQUEST_NULL);
        mpi::detail::check(receives ? MPI_Recv_init(m.given, number, unit, m.peer, m.tag, messages_.get(), &made)
                                    : MPI_Send_init(m.given, number, unit, m.peer, m.tag, messages_.get(), &made),
                           receives ? "MPI_Recv_init" : "MPI_Send_init");
    }

    /// Returns true if a request has ended or is not active.
    [[nodiscard]] static bool is_inactive(MPI_Request request) noexcept {
        int done = 0;
        return MPI_Request_get_status(request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0;
    }

    /// Returns true if a request has ended, is not active or could be cancelled. Never blocks. MPI cancels a receive to
    /// which no message was assigned. Open MPI does not cancel sends.
    [[nodiscard]] static bool has_ended(MPI_Request &request) noexcept {
        if (is_inactive(request)) {
            return true;
        }
        int done = 0;
        static_cast<void>(MPI_Cancel(&request));
        return MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0;
    }

    std::optional<wait_clock::duration> time_limit_;
    wait_clock clock_;
    mpi::detail::communicator messages_; ///< separate communicator, so that other messages do not match
    /// False while messages of an exchange may still arrive. The communicator is then not freed, because MPI could
    /// deliver such a message to a later communicator with the same context id.
    bool may_free_ = true;
    std::shared_ptr<memory> given_out_; ///< memory that is passed to MPI: the buffers of packed messages, or staging
    std::shared_ptr<memory> given_in_;
    memory end_; ///< one byte; freeing it waits for all work of the context, also if the memory above is left to MPI
    std::vector<MPI_Request> requests_; ///< requests of the receives, then of the sends
    std::vector<int> completed_;        ///< output of MPI_Testsome: indices of completed requests
};

/// Messages to and from ranks on other nodes. Separate kernels pack them before MPI sends them, and unpack them after
/// MPI has received them.
class mpi_messages final : public mpi_requests {
  public:
    mpi_messages(const context &ctx, const mpi::node &node, const schedule &all, int rank,
                 const std::shared_ptr<memory> &outbox, const std::shared_ptr<memory> &inbox, const options &how)
        : mpi_requests(ctx, node, all, rank, outbox->location(), false, outbox, inbox, how), nothing_(ctx, {}) {
        const auto copies = [&](std::optional<mpgpu::plan> &made, const std::vector<message> &messages, bool down) {
            std::vector<transfer> transfers;
            for (const message &m : messages) {
                if (m.given != m.box) {
                    const auto bytes = static_cast<std::size_t>(m.part.bytes);
                    const device_span<std::byte> box({m.box, bytes}, outbox->location());
                    const device_span<std::byte> staging({m.given, bytes}, device::host());
                    transfers.push_back(down ? make_transfer(staging, box) : make_transfer(box, staging));
                }
            }
            if (!transfers.empty()) {
                made.emplace(ctx, transfers, how.transfers);
            }
        };
        copies(down_, sent_, true);
        copies(up_, received_, false);
    }

    void packed(stream_view order) override {
        check_usable();
        packed_ = (down_ ? *down_ : nothing_).execute(order);
    }

    void start() override { begin(); }

    exchange_progress progress() override {
        or_fail([this] {
            // The messages of the previous exchange are then unpacked too, because the unpacking is earlier in the same
            // stream.
            if (packed_ && packed_.test()) {
                if (count() > 0) { // a rank may have no neighbour on another node, and MPI refuses an empty list
                    mpi::detail::check(MPI_Startall(count(), receives()), "MPI_Startall");
                }
                now_.packed = now_.to_send;
                count_time();
            }
            if (!packed_) {
                test([](std::uint32_t) {});
                check_time();
            }
        });
        return now_;
    }

    void arrived(stream_view order) override {
        if (up_) {
            up_->enqueue(order);
        }
    }

  private:
    mpgpu::plan nothing_; ///< empty plan; its request ends when a stream reaches it
    request packed_;
    std::optional<mpgpu::plan> down_;
    std::optional<mpgpu::plan> up_;
};

/// Messages to and from ranks on other nodes. One kernel, which runs for the whole exchange, packs and unpacks them. A
/// CPU thread polls for messages that the kernel has packed and sends them. It notifies the kernel of messages that
/// have arrived.
class persistent_messages final : public mpi_requests {
  public:
    persistent_messages(const context &ctx, const mpi::node &node, const schedule &all, int rank,
                        const rank_arrays &arrays, const std::shared_ptr<memory> &outbox,
                        const std::shared_ptr<memory> &inbox, const options &how)
        : mpi_requests(ctx, node, all, rank, arrays[0].location, true, outbox, inbox, how), context_(ctx.get()),
          side_(ctx, arrays[0].location), forked_(ctx), ended_(ctx),
          told_(ctx, arrays[0].location, 2 + sent_.size() + received_.size()) {
        alone_ = std::none_of(all.pairs.begin(), all.pairs.end(),
                              [rank](const rank_pair &p) { return p.on_node && (p.from == rank || p.to == rank); });
        const persistent_copier make = how.persistent_copy
                                           ? how.persistent_copy
                                           : (ctx.backend() == backend::host ? cpu_persistent() : persistent_copier());
        if (!make) {
            fail(refusal(status::not_supported, "how",
                         "options::persistent needs a kernel on the CUDA backend: set options::persistent_copy to "
                         "mpgpu::halo::cuda_persistent() of mpgpu/halo.cuh, in a source that nvcc compiles"));
        }
        persistent_lists lists;
        for (const bool receives : {false, true}) {
            const direction way = receives ? direction::unpack : direction::pack;
            for (const message &m : receives ? received_ : sent_) {
                std::vector<piece> pieces; // pieces of all parts of the messages
                add_pieces(pieces, *m.of, arrays, m.given - m.part.offset, way);
                lists.add({pieces.data() + m.part.first_piece, m.part.pieces});
            }
        }
        kernel_ = make(ctx, arrays[0].location, lists, sent(), told_.in_kernel(), how.persistent, sharing_);
    }
    persistent_messages(const persistent_messages &) = delete;
    persistent_messages(persistent_messages &&) = delete;
    persistent_messages &operator=(const persistent_messages &) = delete;
    persistent_messages &operator=(persistent_messages &&) = delete;
    ~persistent_messages() override { release(); } // otherwise freeing the kernel's memory would block forever

    void packed(stream_view order) override {
        check_usable();
        if (!alone_) { // the kernel runs beside the exchange with ranks of this node
            forked_.record(order);
            side_.wait(forked_);
        }
        runs_in_ = alone_ ? order : stream_view(side_);
    }

    void start() override {
        or_release([this] {
            begin();
            posted_ = false;
            started_.assign(sent_.size(), false);
            kernel_.launch(runs_in_, ++exchange_);
        });
    }

    /// Sends each packed message, and notifies the kernel of each message that has arrived. Receives are posted when
    /// the kernel starts, because the previous exchange has then unpacked its messages. The exchange has ended only
    /// when the messages of this rank are sent, too, because the next kernel overwrites them.
    exchange_progress progress() override {
        or_release([this] {
            constexpr unsigned look = 1024;
            if (++polls_ % look == 0) {
                kernel_.check(runs_in_); // detects a failed kernel, which sends no notifications
            }
            if (!posted_ && !told_.test(begun, exchange_)) {
                return;
            }
            if (!std::exchange(posted_, true)) {
                if (!received_.empty()) {
                    mpi::detail::check(MPI_Startall(static_cast<int>(received_.size()), receives()), "MPI_Startall");
                }
                count_time();
            }
            for (std::size_t m = 0; now_.packed < sent_.size() && m < sent_.size(); ++m) {
                if (!started_[m] && told_.test(packed_at(m), exchange_)) {
                    mpi::detail::check(MPI_Start(sends() + m), "MPI_Start");
                    started_[m] = true;
                    ++now_.packed;
                }
            }
            test([this](std::uint32_t number) {
                told_.raise(arrived_at(sent(), now_.received), arrival(exchange_, number));
            });
            if (now_.is_done()) {
                told_.raise(all_sent_at(sent(), static_cast<std::uint32_t>(received_.size())), exchange_);
            }
            check_time();
        });
        return now_;
    }

    void arrived(stream_view order) override {
        if (!alone_) {
            ended_.record(side_);
            check(mp_stream_wait_event(context_, order.get(), ended_.get()));
        }
    }

  private:
    [[nodiscard]] std::uint32_t sent() const noexcept { return static_cast<std::uint32_t>(sent_.size()); }

    /// Makes the kernel end, even if messages have not arrived.
    void release() noexcept {
        for (std::size_t k = 0; k <= received_.size(); ++k) { // the last index is that of `all_sent_at`
            told_.raise(arrived_at(sent(), k), given_up);
        }
    }

    template <class Step> void or_release(const Step &step) {
#if MPGPU_EXCEPTIONS
        try {
            or_fail(step);
        } catch (...) {
            release();
            throw;
        }
#else
        step();                       // without exceptions, a failure ends the process
#endif
    }

    mp_context_t context_;
    stream side_; ///< stream of the kernel, if it runs beside the exchange with ranks of this node
    event forked_;
    event ended_;
    notifications told_;
    persistent_kernel kernel_;
    stream_view runs_in_ = stream_view::default_stream();
    bool alone_ = false;         ///< true if there is no exchange with ranks of this node
    bool posted_ = false;        ///< true if the receives of the current exchange are posted
    std::uint64_t exchange_ = 0; ///< number of the last exchange
    std::vector<bool> started_;  ///< for each send of the current exchange: true if it is started
    unsigned polls_ = 0;
};

/// Messages to and from ranks on other nodes. A separate thread makes progress on them, from `start` until all of them
/// have ended. During that time only this thread uses the wrapped object.
class messages_by_thread final : public off_node {
  public:
    explicit messages_by_thread(std::shared_ptr<off_node> messages) : messages_(std::move(messages)) {
        int provided = MPI_THREAD_SINGLE;
        mpi::detail::check(MPI_Query_thread(&provided), "MPI_Query_thread");
        if (provided < MPI_THREAD_MULTIPLE) {
            fail(refusal(status::not_supported, "how",
                         "options::progress by a thread needs MPI_THREAD_MULTIPLE: request it from MPI_Init_thread, or "
                         "let the caller make progress"));
        }
        const blocked_signals are_the_programs;
        thread_ = std::thread([this] { run(); });
    }
    messages_by_thread(const messages_by_thread &) = delete;
    messages_by_thread(messages_by_thread &&) = delete;
    messages_by_thread &operator=(const messages_by_thread &) = delete;
    messages_by_thread &operator=(messages_by_thread &&) = delete;
    ~messages_by_thread() override {
        {
            const std::lock_guard<std::mutex> locked(mutex_);
            ends_ = true;
        }
        wake_.notify_one();
        thread_.join();
    }

    void packed(stream_view order) override { messages_->packed(order); }

    void start() override {
        messages_->start();
        {
            const std::lock_guard<std::mutex> locked(mutex_);
            now_ = {};
            now_.to_send = 1; // counts as not done until the thread updates it
            failed_ = nullptr;
            works_ = true;
        }
        wake_.notify_one();
    }

    exchange_progress progress() override {
        const std::lock_guard<std::mutex> locked(mutex_);
#if MPGPU_EXCEPTIONS
        if (failed_) {
            std::rethrow_exception(failed_);
        }
#endif
        return now_;
    }

    void arrived(stream_view order) override {
        messages_->arrived(order);
    }

    void close() noexcept override {
        messages_->close();
    }

  private:
    /// Scope guard that blocks POSIX signals in threads that are created during its lifetime. It restores the signal
    /// mask even if a thread cannot be created.
    struct blocked_signals {
        blocked_signals() noexcept {
            sigset_t all;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);
        }
        blocked_signals(const blocked_signals &) = delete;
        blocked_signals(blocked_signals &&) = delete;
        blocked_signals &operator=(const blocked_signals &) = delete;
        blocked_signals &operator=(blocked_signals &&) = delete;
        ~blocked_signals() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }

        sigset_t before{};
    };

    void run() {
        std::unique_lock<std::mutex> locked(mutex_);
        while (!ends_) {
            if (!works_) {
                wake_.wait(locked);
                continue;
            }
            locked.unlock();
            std::this_thread::yield();
            const exchange_progress now = step();
            locked.lock();
            now_ = now;
            works_ = works_ && !failed_ && !now.is_done();
        }
    }

    exchange_progress step() {
#if MPGPU_EXCEPTIONS
        try {
            return messages_->progress();
        } catch (...) {
            const std::lock_guard<std::mutex> locked(mutex_);
            failed_ = std::current_exception();
            exchange_progress never;
            never.to_send = 1;
            return never;
        }
#else
        return messages_->progress(); // without exceptions, a failure ends the process
#endif
    }

    std::shared_ptr<off_node> messages_;
    std::mutex mutex_;
    std::condition_variable wake_;
    exchange_progress now_;     ///< progress that the thread has reported last
    std::exception_ptr failed_; ///< error that ended the work of the thread
    bool works_ = false;        ///< true while the thread works on an exchange
    bool ends_ = false;
    std::thread thread_;
};

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_MESSAGES_HPP
