// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_MESSAGE_HPP
#define MPGPU_MESSAGE_HPP

/// @file
/// Messages between the ranks of a node, matched as MPI does, in stream order: `messenger`.
///
/// @code
/// mpgpu::messenger messages(node);                                        // collective
/// mpgpu::message_request sent = messages.send(edge, right, tag, stream);  // what earlier work in the stream wrote
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

/// In place of a rank: messages of any rank. No function returns it.
inline constexpr std::int32_t any_rank = MP_ANY_RANK;

/// Names a buffer that another rank may fetch: a plain value, to be sent with a message of the program. The C struct.
using message_descriptor = mp_message_descriptor_t;

/// A message, as its receiver sees it. A plain value.
class message_info {
  public:
    /// The rank that has sent it.
    [[nodiscard]] std::uint32_t rank() const noexcept { return info_.rank; }
    /// Its tag.
    [[nodiscard]] std::uint64_t tag() const noexcept { return info_.tag; }
    /// Its size in bytes, without metadata.
    [[nodiscard]] std::uint64_t bytes() const noexcept { return info_.bytes; }
    /// Its metadata, which live as long as this.
    [[nodiscard]] array_view<const std::byte> metadata() const noexcept {
        return {metadata_.data(), info_.metadata_bytes};
    }
    /// Its metadata as a value; empty where they have another size.
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

    /// Where a C function writes the message, metadata included.
    [[nodiscard]] mp_message_info_t *address() noexcept {
        info_.metadata = metadata_.data();
        info_.metadata_capacity = metadata_.size();
        return &info_;
    }

    mp_message_info_t info_ = MP_MESSAGE_INFO_INIT; ///< in a copy its `metadata` are not to be followed
    std::array<std::byte, MP_MESSAGE_METADATA_BYTES> metadata_{};
};

/// Which tags a receive takes: those that equal `value` in the bits of `mask`.
struct message_tag {
    std::uint64_t value = 0;                ///< compared in the bits of `mask`
    std::uint64_t mask = ~std::uint64_t{0}; ///< bits that count

    /// Exactly this tag.
    constexpr message_tag(std::uint64_t exactly) noexcept : value(exactly) {}
    /// Tags that equal this one in the bits of `bits`.
    constexpr message_tag(std::uint64_t tag, std::uint64_t bits) noexcept : value(tag), mask(bits) {}
    /// Any tag.
    [[nodiscard]] static constexpr message_tag any() noexcept { return {0, 0}; }
};

/// Memory that a message is sent from or received into: of anything with `data()` and `size()`, as `buffer`,
/// `device_span`, `array_view` and `std::vector`, on a GPU or the host. Owns nothing. `Byte` is `void` or `const void`.
template <class Byte> class message_memory {
    template <class C> using pointer_of = decltype(std::declval<C &>().data());
    template <class C> using element_of = std::remove_pointer_t<pointer_of<C>>;

  public:
    /// `bytes` bytes from `data` on.
    constexpr message_memory(Byte *data, std::uint64_t bytes) noexcept : data_(data), bytes_(bytes) {}

    /// All elements of a container or view.
    template <class C, class = std::enable_if_t<std::is_convertible_v<pointer_of<std::remove_reference_t<C>>, Byte *>>,
              class = decltype(std::declval<C &>().size())>
    constexpr message_memory(C &&elements) noexcept
        : data_(elements.data()), bytes_(elements.size() * sizeof(element_of<std::remove_reference_t<C>>)) {
        static_assert(std::is_trivially_copyable_v<element_of<std::remove_reference_t<C>>>,
                      "mpgpu: a message copies bytes, so the elements must allow that");
    }

    /// The first byte.
    [[nodiscard]] constexpr Byte *data() const noexcept { return data_; }
    /// How many.
    [[nodiscard]] constexpr std::uint64_t bytes() const noexcept { return bytes_; }

  private:
    Byte *data_;
    std::uint64_t bytes_;
};

/// A send, a receive, a fetch or a described buffer, to wait for or to ask about. Destroying it forgets it, as with
/// `request`: the operation goes on.
class message_request : public request {
  public:
    /// Nothing to wait for.
    message_request() noexcept = default;

    /// Blocks the calling thread until a send's memory may be used again, or a receive's bytes are there: the message.
    /// Empty afterwards. Throws `message_error` where the message is longer than the buffer or the operation was
    /// cancelled, `peer_gone`, `argument_error` when empty. After a truncation reported to a `std::error_code` the
    /// result is the message that was too long.
    message_info synchronize(on_error failed = {}) {
        message_info message;
        failed.report(mp_wait(handle_.address(), message.address()));
        return message;
    }

    /// The message, once `synchronize` would not block; empty afterwards. Does not block. Throws as `synchronize` does.
    /// An error that is reported to a `std::error_code` is an end too: the result is then as that of `synchronize`.
    [[nodiscard]] std::optional<message_info> test(on_error failed = {}) {
        message_info message;
        std::int32_t done = 0;
        failed.report(mp_test(handle_.address(), &done, message.address()));
        return done != 0 ? std::optional<message_info>(message) : std::nullopt;
    }

    /// The message, where it has matched; does not wait. Throws `argument_error` when empty.
    [[nodiscard]] std::optional<message_info> info(on_error failed = {}) const {
        message_info message;
        std::int32_t matched = 0;
        failed.report(mp_message_get_info(handle_.get(), &matched, message.address()));
        return matched != 0 ? std::optional<message_info>(message) : std::nullopt;
    }

    /// Cancels it where it has not matched; whether it has not. It is still to be waited for or destroyed, and then
    /// ends with `status::cancelled`. Throws `argument_error` when empty.
    bool cancel(on_error failed = {}) {
        std::int32_t cancelled = 0;
        failed.report(mp_request_cancel(handle_.get(), &cancelled));
        return cancelled != 0;
    }
};

/// A descriptor, and the request that ends when what it describes was fetched.
struct described_buffer {
    message_descriptor descriptor; ///< for the rank that fetches
    message_request released;      ///< ends when the memory may be used again
};

/// How much a messenger has room for; 0 for the default. The same on all ranks.
struct messenger_options {
    std::uint32_t operations = 0; ///< operations of a rank that may be under way; 1024 by default
    std::uint32_t messages = 0;   ///< messages that may wait for their receives at a rank; 4096 by default
};

/// One rank's end of the messages of a node. Owns it, and is move-only. Destroying it is each rank's own matter, and
/// blocks until movements under way have ended, twelve seconds at most (`mp_messenger_destroy`).
class messenger {
  public:
    /// No messenger: every call reports `status::invalid_handle`.
    messenger() noexcept = default;

    /// Collective: all ranks of the node make it together. Throws `argument_error`, `not_supported`, `rank_failed`.
    explicit messenger(const node &ranks, const messenger_options &options = {}, on_error failed = {}) {
        mp_messenger_options_t c = MP_MESSENGER_OPTIONS_INIT;
        c.operations = options.operations;
        c.messages = options.messages;
        failed.report(mp_messenger_create(ranks.get(), &c, handle_.address()));
    }

    /// Sends what earlier work in `stream` has written there. `metadata` arrive with the match; they are read during
    /// the call. `mp_send` says more. Throws `argument_error`, `not_supported`, `message_error` where there is no room,
    /// `peer_gone`.
    [[nodiscard]] message_request send(message_memory<const void> data, std::int32_t rank, std::uint64_t tag,
                                       stream_view stream, array_view<const std::byte> metadata = {},
                                       on_error failed = {}) const {
        message_request made;
        failed.report(mp_send(get(), data.data(), data.bytes(), static_cast<std::uint32_t>(rank), tag, metadata.data(),
                              metadata.size(), stream.get(), made.handle_.address()));
        return made;
    }

    /// Receives a message of `rank`, or of `any_rank`, into memory that earlier work in `stream` has left.
    /// `mp_receive` says more. Throws as `send` does.
    [[nodiscard]] message_request receive(message_memory<void> data, std::int32_t rank, message_tag tag,
                                          stream_view stream, on_error failed = {}) const {
        message_request made;
        failed.report(mp_receive(get(), data.data(), data.bytes(), rank, tag.value, tag.mask, stream.get(),
                                 made.handle_.address()));
        return made;
    }

    /// The message that a receive would take now; it stays where it is. Throws `argument_error`, `peer_gone`.
    [[nodiscard]] std::optional<message_info> probe(std::int32_t rank, message_tag tag, on_error failed = {}) const {
        message_info message;
        std::int32_t found = 0;
        failed.report(mp_message_probe(get(), rank, tag.value, tag.mask, &found, message.address()));
        return found != 0 ? std::optional<message_info>(message) : std::nullopt;
    }

    /// Describes what earlier work in `stream` has written there, for one rank that fetches it. Throws as `send` does.
    [[nodiscard]] described_buffer describe(message_memory<const void> data, stream_view stream,
                                            on_error failed = {}) const {
        described_buffer made{};
        failed.report(mp_message_describe(get(), data.data(), data.bytes(), stream.get(), &made.descriptor,
                                          made.released.handle_.address()));
        return made;
    }

    /// Fetches what a descriptor describes, once, into memory that earlier work in `stream` has left. Throws as `send`
    /// does, and `message_error` where the memory is too small.
    [[nodiscard]] message_request fetch(const message_descriptor &descriptor, message_memory<void> data,
                                        stream_view stream, on_error failed = {}) const {
        message_request made;
        failed.report(
            mp_message_fetch(get(), &descriptor, data.data(), data.bytes(), stream.get(), made.handle_.address()));
        return made;
    }

    /// The C handle, still owned by this object.
    [[nodiscard]] mp_messenger_t get() const noexcept { return handle_.get(); }
    /// Whether this owns a messenger.
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

  private:
    detail::handle<mp_messenger_t, detail::destroyed_by<mp_messenger_destroy>> handle_;
};

} // namespace mpgpu

#endif // MPGPU_MESSAGE_HPP
