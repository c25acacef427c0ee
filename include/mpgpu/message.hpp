// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_MESSAGE_HPP
#define MPGPU_MESSAGE_HPP

/// @file
/// Messages between the ranks of a node, matched by MPI's rules and ordered by streams: `messenger`.
///
/// @code
/// mpgpu::messenger messages(node);                                        // collective
/// mpgpu::message_request sent = messages.send(edge, right, tag, stream);  // after earlier work in the stream
/// mpgpu::message_request got = messages.receive(ghost, left, tag, stream);
/// got.wait(stream);                                                       // later work sees the bytes
/// sent.wait(stream);                                                      // and may overwrite the edge
/// @endcode

#include <mpgpu/detail/handle.hpp>
#include <mpgpu/error.hpp>
#include <mpgpu/node.hpp>
#include <mpgpu/request.hpp>
#include <mpgpu/span.hpp>
#include <mpgpu/stream_view.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

namespace mpgpu {

/// Rank number that matches messages from any rank. No function returns it.
inline constexpr std::int32_t any_rank = MP_ANY_RANK;

/// Descriptor of a buffer that another rank may fetch. A plain value that the program can send to another rank. The C
/// struct.
using message_descriptor = mp_message_descriptor_t;

/// Properties of a message that a receive gets: source, tag, size and metadata. A plain value.
class message_info {
  public:
    /// Returns the rank that sent the message.
    [[nodiscard]] std::uint32_t rank() const noexcept { return info_.rank; }
    /// Returns the tag of the message.
    [[nodiscard]] std::uint64_t tag() const noexcept { return info_.tag; }
    /// Returns the size of the message without its metadata, in bytes.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return info_.bytes; }
    /// Returns the metadata. The view is valid for as long as this object exists.
    [[nodiscard]] array_view<const std::byte> metadata() const noexcept {
        return {metadata_.data(), info_.metadata_bytes};
    }
    /// Returns the metadata as a value, or nothing if their size differs from that of `T`.
    template <class T> [[nodiscard]] std::optional<T> metadata_as() const noexcept {
        static_assert(std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T>,
                      "mpgpu: metadata are bytes, so the type must allow that");
        if (info_.metadata_bytes != sizeof(T)) {
            return std::nullopt;
        }
        T value;
        std::memcpy(&value, metadata_.data(), sizeof(T));
        return value;
    }

  private:
    friend class messenger;
    friend class message_request;

    /// Returns the address to which a C function writes the message and its metadata.
    [[nodiscard]] mp_message_info_t *address() noexcept {
        info_.metadata = metadata_.data();
        info_.metadata_capacity = metadata_.size();
        return &info_;
    }

    mp_message_info_t info_ = MP_MESSAGE_INFO_INIT; ///< in a copy, its pointer `metadata` is invalid
    std::array<std::byte, MP_MESSAGE_METADATA_BYTES> metadata_{};
};

/// Tags that a receive accepts: those that equal `value` in all bits that are set in `mask`.
struct message_tag {
    std::uint64_t value = 0;                ///< compared with the tag in the bits that are set in `mask`
    std::uint64_t mask = ~std::uint64_t{0}; ///< bits that must be equal

    /// Accepts exactly this tag.
    constexpr message_tag(std::uint64_t exactly) noexcept : value(exactly) {}
    /// Accepts tags that equal `tag` in all bits that are set in `bits`.
    constexpr message_tag(std::uint64_t tag, std::uint64_t bits) noexcept : value(tag), mask(bits) {}
    /// Accepts any tag.
    [[nodiscard]] static constexpr message_tag any() noexcept { return {0, 0}; }
};

/// Memory that a message is sent from or received into, on a GPU or the host. Constructed from any type with `data()`
/// and `size()`, for example `buffer`, `device_span`, `array_view` and `std::vector`. Owns nothing. `Byte` is `void` or
/// `const void`.
template <class Byte> class message_memory {
    template <class C> using pointer_of = decltype(std::declval<C &>().data());
    template <class C> using element_of = std::remove_pointer_t<pointer_of<C>>;

  public:
    /// Refers to `bytes` bytes that begin at `data`.
    constexpr message_memory(Byte *data, std::uint64_t bytes) noexcept : data_(data), bytes_(bytes) {}

    /// Refers to all elements of a container or view.
    template <class C, class = std::enable_if_t<std::is_convertible_v<pointer_of<std::remove_reference_t<C>>, Byte *>>,
              class = decltype(std::declval<C &>().size())>
    constexpr message_memory(C &&elements) noexcept
        : data_(elements.data()), bytes_(elements.size() * sizeof(element_of<std::remove_reference_t<C>>)) {
        static_assert(std::is_trivially_copyable_v<element_of<std::remove_reference_t<C>>>,
                      "mpgpu: a message copies bytes, so the elements must allow that");
    }

    /// Returns the address of the first byte.
    [[nodiscard]] constexpr Byte *data() const noexcept { return data_; }
    /// Returns the number of bytes.
    [[nodiscard]] constexpr std::uint64_t bytes() const noexcept { return bytes_; }

  private:
    Byte *data_;
    std::uint64_t bytes_;
};

/// Request for a send, a receive, a fetch or a described buffer. Destroying a pending request does not stop the
/// operation, as with `request`.
class message_request : public request {
  public:
    /// Constructs an empty request.
    message_request() noexcept = default;

    /// Blocks the calling thread until the memory of a send may be reused, or the bytes of a receive have arrived, and
    /// returns the message. The request is then empty. Throws `message_error` if the message is longer than the buffer
    /// or the operation was cancelled, `peer_gone`, and `argument_error` if the request is empty. If a truncation is
    /// reported to a `std::error_code`, the result is the message that was too long.
    message_info synchronize(on_error failed = {}) {
        message_info message;
        failed.report(mp_wait(handle_.address(), message.address()));
        return message;
    }

    /// Returns the message if `synchronize` would not block; the request is then empty. Does not block. Throws the
    /// exceptions of `synchronize`. An error that is reported to a `std::error_code` also ends the request; the result
    /// is then the same as that of `synchronize`.
    [[nodiscard]] std::optional<message_info> test(on_error failed = {}) {
        message_info message;
        std::int32_t done = 0;
        failed.report(mp_test(handle_.address(), &done, message.address()));
        return done != 0 ? std::optional<message_info>(message) : std::nullopt;
    }

    /// Returns the message if the operation has matched, without waiting. Throws `argument_error` if the request is
    /// empty.
    [[nodiscard]] std::optional<message_info> info(on_error failed = {}) const {
        message_info message;
        std::int32_t matched = 0;
        failed.report(mp_message_get_info(handle_.get(), &matched, message.address()));
        return matched != 0 ? std::optional<message_info>(message) : std::nullopt;
    }

    /// Cancels an operation that has not matched, and then returns true. The request must still be waited for or
    /// destroyed; it ends with `status::cancelled`. Throws `argument_error` if the request is empty.
    bool cancel(on_error failed = {}) {
        std::int32_t cancelled = 0;
        failed.report(mp_request_cancel(handle_.get(), &cancelled));
        return cancelled != 0;
    }
};

/// Descriptor of a buffer, and the request that ends when the buffer has been fetched.
struct described_buffer {
    message_descriptor descriptor; ///< for the rank that fetches
    message_request released;      ///< completes when the buffer has been fetched and may be reused
};

/// Options of a new messenger. 0 selects the default. All ranks pass the same options.
struct messenger_options {
    std::uint32_t operations = 0; ///< maximum unreceived sends, and unfinished receives, per rank; default 1024
    std::uint32_t messages = 0;   ///< maximum messages from one rank that wait at another; default 4096
};

/// Endpoint through which one rank exchanges messages with the other ranks of a node. Owns its C handle and is
/// move-only. Each rank destroys its messenger independently. The destructor blocks until data movement in progress has
/// ended, at most twelve seconds (`mp_messenger_destroy`).
class messenger {
  public:
    /// Constructs an empty messenger. Every call on it reports `status::invalid_handle`.
    messenger() noexcept = default;

    /// Creates a messenger. Collective: all ranks of the node call it together. Throws `argument_error`,
    /// `not_supported`, `rank_failed`.
    explicit messenger(const node &ranks, const messenger_options &options = {}, on_error failed = {}) {
        mp_messenger_options_t c = MP_MESSENGER_OPTIONS_INIT;
        c.operations = options.operations;
        c.messages = options.messages;
        failed.report(mp_messenger_create(ranks.get(), &c, handle_.address()));
    }

    /// Sends the bytes of `data` after earlier work in `stream` has written them. `metadata` is read during the call
    /// and arrives when the message matches. See `mp_send`. Throws `argument_error`, `not_supported`, `message_error`
    /// if the queue is full, `peer_gone`.
    [[nodiscard]] message_request send(message_memory<const void> data, std::int32_t rank, std::uint64_t tag,
                                       stream_view stream, array_view<const std::byte> metadata = {},
                                       on_error failed = {}) const {
        message_request made;
        failed.report(mp_send(get(), data.data(), data.bytes(), static_cast<std::uint32_t>(rank), tag, metadata.data(),
                              metadata.size(), stream.get(), made.handle_.address()));
        return made;
    }

    /// Receives a message from `rank`, or from any rank with `any_rank`, into `data`, after earlier work in `stream`.
    /// See `mp_receive`. Throws the exceptions of `send`.
    [[nodiscard]] message_request receive(message_memory<void> data, std::int32_t rank, message_tag tag,
                                          stream_view stream, on_error failed = {}) const {
        message_request made;
        failed.report(mp_receive(get(), data.data(), data.bytes(), rank, tag.value, tag.mask, stream.get(),
                                 made.handle_.address()));
        return made;
    }

    /// Returns the message that a receive would take now, without receiving it. Throws `argument_error`, `peer_gone`.
    [[nodiscard]] std::optional<message_info> probe(std::int32_t rank, message_tag tag, on_error failed = {}) const {
        message_info message;
        std::int32_t found = 0;
        failed.report(mp_message_probe(get(), rank, tag.value, tag.mask, &found, message.address()));
        return found != 0 ? std::optional<message_info>(message) : std::nullopt;
    }

    /// Describes the bytes of `data`, after earlier work in `stream` has written them, so that one rank can fetch them.
    /// Throws the exceptions of `send`.
    [[nodiscard]] described_buffer describe(message_memory<const void> data, stream_view stream,
                                            on_error failed = {}) const {
        described_buffer made{};
        failed.report(mp_message_describe(get(), data.data(), data.bytes(), stream.get(), &made.descriptor,
                                          made.released.handle_.address()));
        return made;
    }

    /// Fetches the buffer that a descriptor refers to, once, into `data`, after earlier work in `stream`. Throws the
    /// exceptions of `send`, and `message_error` if `data` is too small.
    [[nodiscard]] message_request fetch(const message_descriptor &descriptor, message_memory<void> data,
                                        stream_view stream, on_error failed = {}) const {
        message_request made;
        failed.report(
            mp_message_fetch(get(), &descriptor, data.data(), data.bytes(), stream.get(), made.handle_.address()));
        return made;
    }

    /// Returns the C handle, which this object still owns.
    [[nodiscard]] mp_messenger_t get() const noexcept { return handle_.get(); }
    /// True if this object owns a messenger.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    detail::handle<mp_messenger_t, detail::destroyed_by<mp_messenger_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_MESSAGE_HPP
