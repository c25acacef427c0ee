// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_ENTRY_HPP
#define MPGPU_ENTRY_HPP

/// @file
/// Messages that call a function of their receiver, as entry methods of Charm++ do. Needs only message.hpp.
///
/// @code
/// mpgpu::entries entries(ctx, messages);
/// entries.on_message(
///     bar_tag,
///     [&](mpgpu::arrival &m) { m.into(0, grid, stream).into(1, list, stream); }, // on arrival: sets the destinations
///     [&](mpgpu::arrival &m) { bar(*m.arguments_as<int>(), grid, list); });      // when the buffers have arrived
///
/// mpgpu::entry_request sent = entries.send(rank, bar_tag, mpgpu::entry_arguments(size), {grid, list}, stream);
/// while (running) {
///     entries.progress(); // calls these functions; never blocks
/// }
/// @endcode
///
/// After J. Choi et al., GPU-aware Communication with UCX in Parallel Programming Models, 2021: `post` and `entry` are
/// its post and regular entry method, a part is its `CkDeviceBuffer`.
///
/// Wire format: a message with at most one part and at most 256 bytes of arguments is one message of `messenger::send`,
/// with the arguments as metadata. Therefore such messages from any sender call functions too. Every other message is a
/// head. Its metadata are `{entry_mark, parts, bytes of arguments}` (64, 32, 32 bits). Its bytes are the descriptor (64
/// bytes) and the size (64 bits) of each part, then the arguments. The receiver fetches each part.
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

/// First word of the metadata of a head.
inline constexpr std::uint64_t entry_mark = 0x7972746e65706d00;

namespace detail {

/// Metadata of a head. The bytes of the head are one `entry_part` per part, then the arguments.
struct entry_head {
    std::uint64_t mark = entry_mark;  ///< `entry_mark`
    std::uint32_t parts = 0;          ///< parts of the message
    std::uint32_t argument_bytes = 0; ///< bytes of the arguments
};

/// One buffer of a send, as a descriptor.
struct entry_part {
    message_descriptor descriptor; ///< descriptor that the receiver fetches
    std::uint64_t bytes;           ///< size of the buffer
};
static_assert(sizeof(entry_head) == 16 && sizeof(entry_part) == 72, "mpgpu: ranks in other languages read them");

/// Throws `argument_error` for an argument.
[[noreturn]] inline void refuse_entry(std::string argument, std::string message) {
    fail({status::invalid_argument, 0, std::move(argument), std::move(message)});
}

} // namespace detail

/// Returns the bytes of a value, as arguments of `entries::send`. The call reads them.
template <class T> [[nodiscard]] array_view<const std::byte> entry_arguments(const T &value) noexcept {
    static_assert(std::is_trivially_copyable_v<T>, "mpgpu: arguments are bytes, so the type must allow that");
    return {reinterpret_cast<const std::byte *>(&value), sizeof(T)};
}

/// Message that has arrived. The function `post` sets the destinations of its parts (buffers); the function `entry` is
/// called when the parts are there.
class arrival {
  public:
    arrival(const arrival &) = delete;
    arrival(arrival &&) = delete;
    arrival &operator=(const arrival &) = delete;
    arrival &operator=(arrival &&) = delete;
    /// Waits for the head of the message, because it is written to memory of this object.
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
    /// Returns the arguments. The view is valid for as long as this object exists.
    [[nodiscard]] array_view<const std::byte> arguments() const noexcept {
        return is_head_ ? array_view<const std::byte>{head_.data() + parts_.size() * sizeof(detail::entry_part),
                                                      head_.size() - parts_.size() * sizeof(detail::entry_part)}
                        : info_.metadata();
    }
    /// Returns the arguments as a value, or nothing if their size differs from that of `T`.
    template <class T> [[nodiscard]] std::optional<T> arguments_as() const noexcept {
        static_assert(std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T>,
                      "mpgpu: arguments are bytes, so the type must allow that");
        const array_view<const std::byte> bytes = arguments();
        if (bytes.size() != sizeof(T)) {
            return std::nullopt;
        }
        T value;
        std::memcpy(&value, bytes.data(), sizeof(T));
        return value;
    }

    /// Returns the number of buffers of the message.
    [[nodiscard]] std::size_t parts() const noexcept { return parts_.size(); }
    /// Returns the size of a part, bytes. `part` must be less than `parts()`.
    [[nodiscard]] std::uint64_t bytes(std::size_t part) const noexcept { return parts_[part].bytes; }

    /// Sets the destination of a part: device or host memory, written after earlier work in `stream`. Called in `post`,
    /// once for each part. Throws `argument_error`, and the exceptions of `messenger::receive`.
    arrival &into(std::size_t part, message_memory<void> to, stream_view stream) {
        if (part >= placed_.size() || placed_[part]) {
            detail::refuse_entry("part", std::to_string(part) + ": a message of " + std::to_string(parts_.size()) +
                                             " parts; each goes to one place");
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

    /// Refers to functions that the owning `entries` holds.
    arrival(const messenger &messages, const message_info &info, const function &post, const function &entry)
        : messages_(messages), info_(info), post_(post), entry_(entry) {
        const auto head = info.metadata_as<detail::entry_head>();
        is_head_ = head && head->mark == entry_mark;
    }

    /// Begins to receive a message that a probe has found. Calls `post` if the message is not a head.
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

    /// Returns true if all parts and the head have arrived. Throws the error of one that failed.
    [[nodiscard]] bool is_there() {
        while (!moving_.empty() && moving_.back().test()) {
            moving_.pop_back();
        }
        return moving_.empty();
    }

    /// Reads a head that has arrived.
    void read() {
        const auto head = *info_.metadata_as<detail::entry_head>();
        const std::size_t table = head.parts * sizeof(detail::entry_part);
        if (head_.size() != table + head.argument_bytes) {
            detail::refuse_entry("bytes", std::to_string(head_.size()) + ": not the head of an entry message");
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

/// Request for a message that calls a function. Destroying a pending request does not stop the message.
class entry_request {
  public:
    /// Constructs an empty request.
    entry_request() noexcept = default;

    /// Blocks until the memory of all parts (buffers of the message) may be written again. Throws the exceptions of
    /// `message_request::synchronize`.
    void synchronize() {
        for (; !parts_.empty(); parts_.pop_back()) {
            parts_.back().synchronize();
        }
    }
    /// Returns true if the memory of all parts may be written again. Never blocks. Throws the exceptions of
    /// `synchronize`.
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

/// Functions that are called for messages of a messenger, by tag. The context and the messenger must outlive this
/// object. Only one thread may use an object; other threads need their own objects, for other tags. Messages that are
/// incomplete when this object is destroyed are not received.
class entries {
  public:
    /// Function that `progress` calls with a message that has arrived.
    using function = std::function<void(arrival &)>;

    /// Creates an object without functions. Not collective. Throws `argument_error`, `driver_error`.
    entries(const context &ctx, const messenger &messages) : messages_(messages), control_(ctx, device::host()) {}
    entries(const entries &) = delete;
    entries(entries &&) = delete;
    entries &operator=(const entries &) = delete;
    entries &operator=(entries &&) = delete;
    ~entries() = default;

    /// Registers functions for messages whose tag matches. Such a message calls `post` when it has arrived, and `entry`
    /// when its parts are at the destinations that `post` has set. Nothing else may receive such messages.
    void on_message(message_tag tag, function post, function entry) {
        functions_.push_back({tag, std::move(post), std::move(entry)});
    }

    /// Sends arguments, which are read during the call, and buffers, after earlier work in `stream` has written them.
    /// The buffers must stay unchanged until the request has ended. Throws the exceptions of `messenger::send`.
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
            std::error_code ignored; // the requests of the parts report it
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

    /// Checks for messages and calls their functions, in no particular order. Returns the number of calls. Never
    /// blocks. Throws the exceptions of the functions and the errors of messages. The message concerned is then
    /// dropped; if `post` has not set its destinations, it may be found again.
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
            std::unique_ptr<arrival> one = std::move(*at); // dropped if it throws
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
    /// Cancels described parts if the send fails, because no rank will fetch them.
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

        std::vector<std::byte> bytes; // read until the request has ended
        message_request request;
    };

    const messenger &messages_;
    stream control_; // for heads, which do not wait for the program's work
    std::list<registered> functions_;
    std::list<sent_head> sent_;
    std::list<std::unique_ptr<arrival>> arrivals_;
};

} // namespace mpgpu

#endif // MPGPU_ENTRY_HPP
