// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_MESSAGE_HPP
#define MPGPU_MESSAGE_HPP

/// @file
/// Messages between the ranks of a node (`messenger`). They match as in MPI and are ordered by streams.
///
/// @code
/// mpgpu::messenger messages(node);                                        // collective
/// mpgpu::message_request sent = messages.send(edge, right, tag, stream);  // after earlier work in the stream
/// mpgpu::message_request got = messages.receive(ghost, left, tag, stream);
/// got.wait(stream);                                                       // later work sees the data
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

/// Rank number that matches messages from any rank. Accepted by receives and probes; never returned.
inline constexpr std::int32_t any_rank = MP_ANY_RANK;

/// Descriptor of a buffer that another rank can copy to its own memory (`messenger::fetch`). A plain value that the
/// program sends to that rank. An alias of the C struct.
using message_descriptor = mp_message_descriptor_t;

/// Properties of a message: source rank, tag, size and metadata. A plain value.
class message_info {
  public:
    /// Returns the rank that sent the message.
    [[nodiscard]] std::uint32_t rank() const noexcept { return info_.rank; }
    /// Returns the tag of the message.
    [[nodiscard]] std::uint64_t tag() const noexcept { return info_.tag; }
    /// Returns the size of the message without its metadata, in bytes.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return info_.bytes; }
    /// Returns the metadata of the message. The view is valid as long as this object exists.
    [[nodiscard]] array_view<const std::byte> metadata() const noexcept {
        return {metadata_.data(), info_.metadata_bytes};
    }
    /// Returns the metadata of the message as a value of type `T`. Returns nothing if the size of the metadata differs
    /// from the size of `T`.
    template <class T> [[nodiscard]] std::optional<T> metadata_as() const noexcept {
        static_assert(std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T>,
                      "mpgpu: metadata are bytes, so the type must be trivially copyable and default constructible");
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

    /// Returns the address to which a C function writes the properties and the metadata.
    [[nodiscard]] mp_message_info_t *address() noexcept {
        info_.metadata = metadata_.data();
        info_.metadata_capacity = metadata_.size();
        return &info_;
    }

    mp_message_info_t info_ = MP_MESSAGE_INFO_INIT; ///< the pointer `metadata` in it is invalid after a copy
    std::array<std::byte, MP_MESSAGE_METADATA_BYTES> metadata_{};
};

/// Tags that a receive accepts: those that equal `value` in all bits that are set in `mask`. The default mask accepts
/// exactly `value`.
struct message_tag {
    std::uint64_t value = 0;                ///< value that the tag must equal in the bits of `mask`
    std::uint64_t mask = ~std::uint64_t{0}; ///< bits of the tag that must be equal

    /// Constructs a filter that accepts exactly this tag.
    constexpr message_tag(std::uint64_t exactly) noexcept : value(exactly) {}
    /// Constructs a filter that accepts tags which equal `tag` in all bits that are set in `bits`.
    constexpr message_tag(std::uint64_t tag, std::uint64_t bits) noexcept : value(tag), mask(bits) {}
    /// Returns a filter that accepts any tag.
    [[nodiscard]] static constexpr message_tag any() noexcept { return {0, 0}; }
};

/// Non-owning view of memory, on a GPU or the host, from which a message is sent or into which it is received. It can
/// be constructed from any type with `data()` and `size()`, for example `buffer`, `device_span`, `array_view` and
/// `std::vector`. `Byte` is `const void` for sends and `void` for receives.
template <class Byte> class message_memory {
    template <class C> using pointer_of = decltype(std::declval<C &>().data());
    template <class C> using element_of = std::remove_pointer_t<pointer_of<C>>;

  public:
    /// Constructs a view of the `bytes` bytes that begin at `data`.
    constexpr message_memory(Byte *data, std::uint64_t bytes) noexcept : data_(data), bytes_(bytes) {}

    /// Refers to all elements of a container or view.
    template <class C, class = std::enable_if_t<std::is_convertible_v<pointer_of<std::remove_reference_t<C>>, Byte *>>,
              class = decltype(std::declval<C &>().size())>
    /// Constructs a view of all elements of a container or view.
    constexpr message_memory(C &&elements) noexcept
        : data_(elements.data()), bytes_(elements.size() * sizeof(element_of<std::remove_reference_t<C>>)) {
        static_assert(std::is_trivially_copyable_v<element_of<std::remove_reference_t<C>>>,
                      "mpgpu: a message copies bytes, so the elements must be trivially copyable");
    }

    /// Returns the address of the first byte.
    [[nodiscard]] constexpr Byte *data() const noexcept { return data_; }
    /// Returns the size of the memory in bytes.
    [[nodiscard]] constexpr std::uint64_t bytes() const noexcept { return bytes_; }

  private:
    Byte *data_;
    std::uint64_t bytes_;
};

/// Request: an operation that the program can wait for. It is a send, a receive, a fetch, or the release of a described
/// buffer (buffer that another rank may fetch). Destroying a pending request does not block and does not stop the
/// operation.
class message_request : public request {
  public:
    /// Constructs an empty request.
    message_request() noexcept = default;

    /// Blocks the calling thread until the memory of a send may be reused or the data of a receive have arrived.
    /// Returns the properties of the message. The request is then empty.
    ///
    /// Throws `message_error` if the message is longer than the buffer or the operation was cancelled. Throws
    /// `peer_gone`, and `argument_error` if the request is empty. If `failed` is a `std::error_code`, nothing is
    /// thrown. The result then describes the message even if the message is too long.
    message_info synchronize(on_error failed = {}) {
        message_info message;
        failed.report(mp_wait(handle_.address(), message.address()));
        return message;
    }

    /// Returns the properties of the message if the operation has ended; the request is then empty. Otherwise returns
    /// nothing. Does not block. Throws the exceptions of `synchronize`. If `failed` is a `std::error_code` and the
    /// operation has ended with an error, the request is also empty, and the result is the one that `synchronize`
    /// returns.
    [[nodiscard]] std::optional<message_info> test(on_error failed = {}) {
        message_info message;
        std::int32_t done = 0;
        failed.report(mp_test(handle_.address(), &done, message.address()));
        return done != 0 ? std::optional<message_info>(message) : std::nullopt;
    }

    /// Returns the properties of the message if its send and its receive have matched, otherwise nothing. Does not
    /// block. The request stays valid. Throws `argument_error` if the request is empty.
    [[nodiscard]] std::optional<message_info> info(on_error failed = {}) const {
        message_info message;
        std::int32_t matched = 0;
        failed.report(mp_message_get_info(handle_.get(), &matched, message.address()));
        return matched != 0 ? std::optional<message_info>(message) : std::nullopt;
    }

    /// Tries to cancel an operation that has not matched, and returns true if it was cancelled. The request then ends
    /// with `status::cancelled`. In both cases it must still be waited for or destroyed. Throws `argument_error` if the
    /// request is empty.
    bool cancel(on_error failed = {}) {
        std::int32_t cancelled = 0;
        failed.report(mp_request_cancel(handle_.get(), &cancelled));
        return cancelled != 0;
    }
};

/// Result of `messenger::describe`: the descriptor of a buffer, and the request that ends when another rank has fetched
/// the buffer.
struct described_buffer {
    message_descriptor descriptor; ///< descriptor to send to the rank that copies the buffer with `messenger::fetch`
    message_request released;      ///< request that ends when the buffer has been copied and may be reused
};

/// Options of a messenger. All ranks pass the same options. 0 selects the default.
struct messenger_options {
    std::uint32_t operations = 0; ///< maximum number of pending sends, and of pending receives, per rank; default 1024
    std::uint32_t messages = 0;   ///< maximum number of unreceived messages from one rank to another; default 4096
};

/// Messenger: object through which one rank exchanges messages with the other ranks of a node. Owns its C handle and is
/// move-only. Each rank destroys its messenger independently. The destructor blocks, for at most twelve seconds, until
/// data transfers in progress have ended (`mp_messenger_destroy`).
class messenger {
  public:
    /// Constructs an empty messenger. Every function called on it reports `status::invalid_handle`.
    messenger() noexcept = default;

    /// Creates a messenger. Collective: all ranks of the node call it together. Blocks until all ranks have called it.
    /// Throws `argument_error`, `not_supported`, `rank_failed`.
    explicit messenger(const node &ranks, const messenger_options &options = {}, on_error failed = {}) {
        mp_messenger_options_t c = MP_MESSENGER_OPTIONS_INIT;
        c.operations = options.operations;
        c.messages = options.messages;
        failed.report(mp_messenger_create(ranks.get(), &c, handle_.address()));
    }

    /// Sends `data` to rank `rank` with the tag `tag`, after earlier work in `stream` has written the data. Does not
    /// block. The memory must stay unchanged until the request has ended. `metadata` is read during the call and
    /// arrives when the message matches. See `mp_send`. Throws `argument_error`, `not_supported`, `peer_gone`. Throws
    /// `message_error` if the queue is full.
    [[nodiscard]] message_request send(message_memory<const void> data, std::int32_t rank, std::uint64_t tag,
                                       stream_view stream, array_view<const std::byte> metadata = {},
                                       on_error failed = {}) const {
        message_request made;
        failed.report(mp_send(get(), data.data(), data.bytes(), static_cast<std::uint32_t>(rank), tag, metadata.data(),
                              metadata.size(), stream.get(), made.handle_.address()));
        return made;
    }

    /// Receives a message from rank `rank`, or from any rank with `any_rank`, into `data`, after earlier work in
    /// `stream`. Does not block. `tag` selects the tags that are accepted. The memory must stay allocated until the
    /// request has ended. See `mp_receive`. Throws the exceptions of `send`.
    [[nodiscard]] message_request receive(message_memory<void> data, std::int32_t rank, message_tag tag,
                                          stream_view stream, on_error failed = {}) const {
        message_request made;
        failed.report(mp_receive(get(), data.data(), data.bytes(), rank, tag.value, tag.mask, stream.get(),
                                 made.handle_.address()));
        return made;
    }

    /// Returns the properties of the message that a receive with this rank and tag would get now, without receiving it.
    /// Returns nothing if there is no such message. Does not block. Throws `argument_error`, `peer_gone`.
    [[nodiscard]] std::optional<message_info> probe(std::int32_t rank, message_tag tag, on_error failed = {}) const {
        message_info message;
        std::int32_t found = 0;
        failed.report(mp_message_probe(get(), rank, tag.value, tag.mask, &found, message.address()));
        return found != 0 ? std::optional<message_info>(message) : std::nullopt;
    }

    /// Creates a descriptor of `data`, with which one other rank can copy (fetch) the data to its own memory. The data
    /// are valid after earlier work in `stream`. Does not block. See `mp_message_describe`. Throws the exceptions of
    /// `send`.
    [[nodiscard]] described_buffer describe(message_memory<const void> data, stream_view stream,
                                            on_error failed = {}) const {
        described_buffer made{};
        failed.report(mp_message_describe(get(), data.data(), data.bytes(), stream.get(), &made.descriptor,
                                          made.released.handle_.address()));
        return made;
    }

    /// Copies the buffer of a descriptor into `data`, after earlier work in `stream`. Does not block. A descriptor can
    /// be fetched once. See `mp_message_fetch`. Throws the exceptions of `send`. Throws `message_error` if `data` is
    /// too small.
    [[nodiscard]] message_request fetch(const message_descriptor &descriptor, message_memory<void> data,
                                        stream_view stream, on_error failed = {}) const {
        message_request made;
        failed.report(
            mp_message_fetch(get(), &descriptor, data.data(), data.bytes(), stream.get(), made.handle_.address()));
        return made;
    }

    /// Returns the C handle, which this object continues to own.
    [[nodiscard]] mp_messenger_t get() const noexcept { return handle_.get(); }
    /// Returns true if this object owns a messenger.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    detail::handle<mp_messenger_t, detail::destroyed_by<mp_messenger_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_MESSAGE_HPP
