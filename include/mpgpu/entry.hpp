// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_ENTRY_HPP
#define MPGPU_ENTRY_HPP

/// @file
/// Messages that call a function on the receiving rank, like entry methods in Charm++. Needs only message.hpp.
///
/// A message consists of arguments (a few bytes) and parts (buffers in device or host memory).
///
/// @code
/// mpgpu::entries entries(ctx, messages);
/// entries.on_message(
///     bar_tag,
///     [&](mpgpu::arrival &m) { m.into(0, grid, stream).into(1, list, stream); }, // post: sets the destinations
///     [&](mpgpu::arrival &m) { bar(*m.arguments_as<int>(), grid, list); });      // entry: the parts have arrived
///
/// mpgpu::entry_request sent = entries.send(rank, bar_tag, mpgpu::entry_arguments(size), {grid, list}, stream);
/// while (running) {
///     entries.progress(); // calls these functions; never blocks
/// }
/// @endcode
///
/// The design follows J. Choi et al., GPU-aware Communication with UCX in Parallel Programming Models, 2021. The
/// functions `post` and `entry` correspond to the post entry method and the regular entry method of the paper, and a
/// part corresponds to its `CkDeviceBuffer`.
///
/// Wire format:
/// - A message with at most one part and at most 256 bytes of arguments is one message of `messenger::send`, with the
///   arguments as metadata. Therefore messages that the program sends with `messenger::send` also call functions.
/// - For any other message, a header message is sent. Its metadata are `{entry_mark, number of parts, size of the
///   arguments in bytes}` (64, 32 and 32 bits). Its data are the descriptor (64 bytes) and the size (64 bits) of each
///   part, followed by the arguments. The receiver fetches each part.
///
/// Errors are thrown.

#include <mpgpu/context.hpp>
#include <mpgpu/message.hpp>
#include <mpgpu/stream.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

namespace mpgpu {

/// Magic number at the start of the metadata of a header message. A header message describes the parts (buffers) of a
/// message that has several parts.
inline constexpr std::uint64_t entry_mark = 0x7972746e65706d00;

namespace detail {

/// Metadata of a header message. The data of the message are one `entry_part` per part, followed by the arguments.
struct entry_head {
    std::uint64_t mark = entry_mark;  ///< identifies a header message; always `entry_mark`
    std::uint32_t parts = 0;          ///< number of parts (buffers)
    std::uint32_t argument_bytes = 0; ///< size of the arguments in bytes
};

/// Description of one part (buffer) in a header message.
struct entry_part {
    message_descriptor descriptor; ///< descriptor with which the receiver fetches the buffer
    std::uint64_t bytes;           ///< size of the buffer in bytes
};
static_assert(sizeof(entry_head) == 16 && sizeof(entry_part) == 72, "mpgpu: ranks in other languages read them");

/// Throws `argument_error` for an invalid argument.
[[noreturn]] inline void refuse_entry(std::string argument, std::string message) {
    fail({status::invalid_argument, 0, std::move(argument), std::move(message)});
}

} // namespace detail

/// Returns a view of the bytes of a value, to pass as arguments to `entries::send`. The bytes are read during that
/// call.
template <class T> [[nodiscard]] array_view<const std::byte> entry_arguments(const T &value) noexcept {
    static_assert(std::is_trivially_copyable_v<T>,
                  "mpgpu: arguments are copied as bytes, so the type must be trivially copyable");
    return {reinterpret_cast<const std::byte *>(&value), sizeof(T)};
}

/// Arrived message, which is passed to the functions that are registered for its tag. The function `post` sets the
/// destinations of its parts (buffers). The function `entry` is called when the parts have arrived there.
class arrival {
  public:
    arrival(const arrival &) = delete;
    arrival(arrival &&) = delete;
    arrival &operator=(const arrival &) = delete;
    arrival &operator=(arrival &&) = delete;
    /// Blocks until the header of the message has arrived, because it is written to memory of this object.
    ~arrival() {
        if (is_head_ && !is_posted_ && !moving_.empty()) {
            std::error_code ignored;
            static_cast<void>(moving_.back().synchronize(ignored));
        }
    }

    /// Returns the rank that sent the message.
    [[nodiscard]] std::uint32_t rank() const noexcept { return info_.rank(); }
    /// Returns the tag of the message.
    [[nodiscard]] std::uint64_t tag() const noexcept { return info_.tag(); }
    /// Returns the arguments of the message as bytes. The view is valid as long as this object exists.
    [[nodiscard]] array_view<const std::byte> arguments() const noexcept {
        return is_head_ ? array_view<const std::byte>{head_.data() + parts_.size() * sizeof(detail::entry_part),
                                                      head_.size() - parts_.size() * sizeof(detail::entry_part)}
                        : info_.metadata();
    }
    /// Returns the arguments of the message as a value of type `T`. Returns nothing if their size differs from the size
    /// of `T`.
    template <class T> [[nodiscard]] std::optional<T> arguments_as() const noexcept {
        static_assert(std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T>,
                      "mpgpu: arguments are copied as bytes, so the type must be trivially copyable");
        const array_view<const std::byte> bytes = arguments();
        if (bytes.size() != sizeof(T)) {
            return std::nullopt;
        }
        T value;
        std::memcpy(&value, bytes.data(), sizeof(T));
        return value;
    }

    /// Returns the number of parts (buffers) of the message.
    [[nodiscard]] std::size_t parts() const noexcept { return parts_.size(); }
    /// Returns the size in bytes of the part with the index `part`, which must be less than `parts()`.
    [[nodiscard]] std::uint64_t bytes(std::size_t part) const noexcept { return parts_[part].bytes; }

    /// Sets the destination of the part with the index `part`: device or host memory `to`, which is written after
    /// earlier work in `stream`. Call it in the function `post`, once for each part. Returns this object, so that calls
    /// can be chained. Throws `argument_error`, and the exceptions of `messenger::receive`.
    arrival &into(std::size_t part, message_memory<void> to, stream_view stream) {
        if (part >= placed_.size() || placed_[part]) {
            detail::refuse_entry("part", std::to_string(part) + ": the message has " + std::to_string(parts_.size()) +
                                             " parts; place each part once");
        }
        if (to.bytes() < bytes(part)) {
            detail::refuse_entry("to", std::to_string(to.bytes()) + " bytes: part " + std::to_string(part) + " has " +
                                           std::to_string(bytes(part)));
        }
        if (is_head_) {
            moving_.push_back(messages_.fetch(parts_[part].descriptor, to, stream));
        } else {
            receive(to, stream);
        }
        placed_[part] = true;
        return *this;
    }

  private:
    friend class entries;

    using function = std::function<void(arrival &)>;

    /// Constructs an arrived message. Keeps references to `messages`, `post` and `entry`, which must outlive it.
    arrival(const messenger &messages, const message_info &info, const function &post, const function &entry)
        : messages_(messages), info_(info), post_(post), entry_(entry) {
        const auto head = info.metadata_as<detail::entry_head>();
        is_head_ = head && head->mark == entry_mark;
    }

    /// Starts to receive the message, which `messenger::probe` has found. Calls `post` immediately, unless the message
    /// is a header message.
    void take(stream_view control) {
        if (is_head_) {
            head_.resize(static_cast<std::size_t>(info_.bytes()));
            receive(head_, control);
        } else if (info_.bytes() == 0) {
            receive({nullptr, 0}, control);
            post();
        } else {
            parts_.push_back({{}, info_.bytes()});
            post();
        }
    }

    void receive(message_memory<void> to, stream_view order) {
        moving_.push_back(messages_.receive(to, static_cast<std::int32_t>(rank()), tag(), order));
    }

    /// Returns true if the header and all parts have arrived. Throws the error if receiving one of them failed.
    [[nodiscard]] bool is_there() {
        while (!moving_.empty() && moving_.back().test()) {
            moving_.pop_back();
        }
        return moving_.empty();
    }

    /// Parses a header message that has arrived.
    void read() {
        const auto head = *info_.metadata_as<detail::entry_head>();
        const std::size_t table = head.parts * sizeof(detail::entry_part);
        if (head_.size() != table + head.argument_bytes) {
            detail::refuse_entry("bytes",
                                 std::to_string(head_.size()) + " bytes are not the header of an entry message");
        }
        parts_.resize(head.parts);
        if (table > 0) {
            std::memcpy(parts_.data(), head_.data(), table);
        }
    }

    void post() {
        placed_.assign(parts_.size(), false);
        is_posted_ = true;
        post_(*this);
        if (std::find(placed_.begin(), placed_.end(), false) != placed_.end()) {
            detail::refuse_entry("post", "a message of rank " + std::to_string(rank()) + ", tag " +
                                             std::to_string(tag()) + ": post has not placed all of its " +
                                             std::to_string(parts()) + " parts");
        }
    }

    const messenger &messages_;
    message_info info_;
    const function &post_;
    const function &entry_;
    bool is_head_ = false;
    bool is_posted_ = false;
    std::vector<std::byte> head_;
    std::vector<detail::entry_part> parts_;
    std::vector<bool> placed_;
    std::vector<message_request> moving_;
};

/// Request for the completion of `entries::send`. Destroying a pending request does not stop the send.
class entry_request {
  public:
    /// Constructs an empty request.
    entry_request() noexcept = default;

    /// Blocks until the memory of all parts (buffers of the sent message) may be reused. Throws the exceptions of
    /// `message_request::synchronize`.
    void synchronize() {
        for (; !parts_.empty(); parts_.pop_back()) {
            parts_.back().synchronize();
        }
    }
    /// Returns true if the memory of all parts (buffers of the sent message) may be reused. Never blocks. Throws the
    /// exceptions of `synchronize`.
    [[nodiscard]] bool test() {
        while (!parts_.empty() && parts_.back().test()) {
            parts_.pop_back();
        }
        return parts_.empty();
    }

  private:
    friend class entries;
    std::vector<message_request> parts_;
};

/// Table of functions that are called for messages with given tags. It sends such messages and, in `progress`, receives
/// them and calls their functions. The context and the messenger must outlive this object.
///
/// Only one thread may use an object. Other threads use their own objects, for other tags. Messages that are incomplete
/// when the object is destroyed are not received.
class entries {
  public:
    /// Function that `progress` calls with a message that has arrived.
    using function = std::function<void(arrival &)>;

    /// Creates a table without functions. Not collective. Throws `argument_error`, `driver_error`.
    entries(const context &ctx, const messenger &messages) : messages_(messages), control_(ctx, device::host()) {}
    entries(const entries &) = delete;
    entries(entries &&) = delete;
    entries &operator=(const entries &) = delete;
    entries &operator=(entries &&) = delete;
    ~entries() = default;

    /// Registers functions for messages whose tag matches `tag`. When such a message arrives, `progress` calls `post`,
    /// which sets the destinations of the parts (buffers). When all parts have arrived there, `progress` calls `entry`.
    /// The program must not receive messages with these tags in any other way.
    void on_message(message_tag tag, function post, function entry) {
        functions_.push_back({tag, std::move(post), std::move(entry)});
    }

    /// Sends a message with arguments and parts (buffers) to rank `rank`, after earlier work in `stream` has written
    /// the parts. Does not block. The arguments are read during the call. The parts must stay unchanged until the
    /// request has ended. Throws the exceptions of `messenger::send`.
    [[nodiscard]] entry_request send(std::uint32_t rank, std::uint64_t tag, array_view<const std::byte> arguments,
                                     const std::vector<message_memory<const void>> &parts, stream_view stream) {
        entry_request made;
        if (parts.size() <= 1 && arguments.size() <= MP_MESSAGE_METADATA_BYTES &&
            (parts.empty() || parts[0].bytes() > 0)) {
            const message_memory<const void> part = parts.empty() ? message_memory<const void>(nullptr, 0) : parts[0];
            made.parts_.push_back(messages_.send(part, static_cast<std::int32_t>(rank), tag, stream, arguments));
            return made;
        }
        sent_.remove_if([](sent_head &head) {
            std::error_code ignored; // the requests of the parts report errors
            return head.request.test(ignored) || ignored;
        });
        detail::entry_head head;
        head.parts = static_cast<std::uint32_t>(parts.size());
        head.argument_bytes = static_cast<std::uint32_t>(arguments.size());
        std::vector<detail::entry_part> described;
        withdrawal unless_sent{made.parts_};
        for (const message_memory<const void> &part : parts) {
            described_buffer of = messages_.describe(part, stream);
            described.push_back({of.descriptor, part.bytes()});
            made.parts_.push_back(std::move(of.released));
        }
        sent_head &sent = sent_.emplace_back();
        const std::size_t table = described.size() * sizeof(detail::entry_part);
        sent.bytes.resize(table + arguments.size());
        if (table > 0) {
            std::memcpy(sent.bytes.data(), described.data(), table);
        }
        std::copy(arguments.begin(), arguments.end(), sent.bytes.begin() + static_cast<std::ptrdiff_t>(table));
        sent.request =
            messages_.send(sent.bytes, static_cast<std::int32_t>(rank), tag, control_, entry_arguments(head));
        unless_sent.is_due = false;
        return made;
    }

    /// Receives messages and calls the registered functions, in no particular order. Returns the number of functions
    /// that were called. Never blocks.
    ///
    /// Throws the exceptions of the registered functions, and errors that occur while a message is received. The
    /// message that caused the exception is dropped. Exception: if the message failed before the function `post` (see
    /// `on_message`) had set its destinations, it may stay queued, and a later call then receives it again.
    std::size_t progress() {
        std::size_t calls = 0;
        for (const registered &of : functions_) {
            while (const std::optional<message_info> found = messages_.probe(any_rank, of.tag)) {
                std::unique_ptr<arrival> one(new arrival(messages_, *found, of.post, of.entry));
                one->take(control_);
                calls += one->is_posted_ ? 1 : 0;
                arrivals_.push_back(std::move(one));
            }
        }
        for (auto at = arrivals_.begin(); at != arrivals_.end();) {
            std::unique_ptr<arrival> one = std::move(*at); // the message is dropped if this throws
            at = arrivals_.erase(at);
            bool there = one->is_there();
            if (there && !one->is_posted_) {
                one->read();
                one->post();
                ++calls;
                there = one->is_there();
            }
            if (there) {
                one->entry_(*one);
                ++calls;
            } else {
                arrivals_.insert(at, std::move(one));
            }
        }
        return calls;
    }

  private:
    struct registered {
        message_tag tag;
        function post;
        function entry;
    };
    /// Scope guard that cancels the requests of the described parts (buffers that the receiver would fetch) if the send
    /// fails.
    struct withdrawal {
        std::vector<message_request> &parts;
        bool is_due = true;

        explicit withdrawal(std::vector<message_request> &all) : parts(all) {}
        withdrawal(const withdrawal &) = delete;
        withdrawal(withdrawal &&) = delete;
        withdrawal &operator=(const withdrawal &) = delete;
        withdrawal &operator=(withdrawal &&) = delete;
        ~withdrawal() {
            for (message_request &part : parts) {
                std::error_code ignored;
                if (is_due) {
                    part.cancel(ignored);
                }
            }
        }
    };
    struct sent_head {
        sent_head() = default;
        sent_head(const sent_head &) = delete;
        sent_head(sent_head &&) = delete;
        sent_head &operator=(const sent_head &) = delete;
        sent_head &operator=(sent_head &&) = delete;
        ~sent_head() {
            if (request) {
                std::error_code ignored;
                static_cast<void>(request.synchronize(ignored));
            }
        }

        std::vector<std::byte> bytes; // the send reads it until the request has ended
        message_request request;
    };

    const messenger &messages_;
    stream control_; // stream of header messages; they need not wait for the program's work
    std::list<registered> functions_;
    std::list<sent_head> sent_;
    std::list<std::unique_ptr<arrival>> arrivals_;
};

} // namespace mpgpu

#endif // MPGPU_ENTRY_HPP
