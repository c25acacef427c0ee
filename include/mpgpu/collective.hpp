// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_COLLECTIVE_HPP
#define MPGPU_COLLECTIVE_HPP

/// @file
/// Collective operations: `broadcast`, `scatter`, `gather`, `all_gather` and `all_to_all`. They return transfers
/// between devices of one process, or send and receive descriptors of one rank. There are no reductions. Plan the
/// transfers of a collective together: participants that already have data then forward them to others.
///
/// @code
/// // One process. Planning the same transfers again takes only a look-up.
/// mpgpu::plan weights(ctx, mpgpu::broadcast(model, copies));
/// weights.enqueue(stream);
///
/// // Ranks of a node. All of them call plan_exchange together.
/// mpgpu::plan steps = node.plan_exchange(mpgpu::all_gather(node, own, all));
/// steps.enqueue(stream); // each time step
/// @endcode
///
/// The blocks of several participants are contiguous, in the order of the participants. A block that is already at its
/// destination is not copied. This allows an in-place `all_gather` (`MPI_IN_PLACE`), in which each source lies inside
/// the destination of the same participant. An in-place all-to-all would need temporary memory, so planning it fails.

#include <mpgpu/error.hpp>
#include <mpgpu/node.hpp>
#include <mpgpu/span.hpp>
#include <mpgpu/transfer.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

namespace mpgpu {

namespace detail {

/// Returns the copies (pieces) of a collective. `sizes` contains the sizes of its blocks in bytes.
[[nodiscard]] inline std::vector<mp_piece_t> pieces_of(mp_collective_t collective, std::size_t participants,
                                                       std::size_t root, const std::vector<std::uint64_t> &sizes,
                                                       on_error failed) {
    std::size_t count = 0;
    const auto call = [&](mp_piece_t *pieces, std::size_t capacity) {
        return mp_collective(collective, static_cast<std::uint32_t>(participants), static_cast<std::uint32_t>(root), 0,
                             sizes.data(), pieces, capacity, &count);
    };
    failed.report(call(nullptr, 0));
    std::vector<mp_piece_t> pieces(count);
    if (count > 0) {
        failed.report(call(pieces.data(), pieces.size()));
    }
    return pieces;
}

/// Untyped memory range on one device.
struct block {
    const void *memory;  ///< address of the first byte
    std::int32_t device; ///< device that owns the memory
    std::uint64_t bytes; ///< size in bytes
};

/// Returns the memory ranges of the buffers or spans in a container.
template <class Ends> [[nodiscard]] std::vector<block> blocks_of(Ends &&ends) {
    std::vector<block> blocks;
    for (auto &&end : ends) {
        const auto span = as_device_span(end);
        blocks.push_back({span.data(), span.location().id(), span.size_bytes()});
    }
    return blocks;
}
/// Returns the memory range of a buffer or a span.
template <class End> [[nodiscard]] block block_of(End &&end) {
    const auto span = as_device_span(end);
    return {span.data(), span.location().id(), span.size_bytes()};
}

/// Returns the size in bytes of each memory range.
[[nodiscard]] inline std::vector<std::uint64_t> sizes_of(const std::vector<block> &blocks) {
    std::vector<std::uint64_t> sizes(blocks.size());
    for (std::size_t at = 0; at < blocks.size(); ++at) {
        sizes[at] = blocks[at].bytes;
    }
    return sizes;
}

/// Returns the error for memory whose size differs from the number of bytes to copy.
[[nodiscard]] inline std::optional<error_details> wrong_size(const char *argument, const std::string &what,
                                                             std::uint64_t has, std::uint64_t bytes) {
    if (has == bytes) {
        return std::nullopt;
    }
    return error_details{status::invalid_argument, 0, argument,
                         what + " has " + std::to_string(has) + " bytes, but " + std::to_string(bytes) +
                             " are transferred there: pass a span of that size"};
}

/// Returns true if the size of a memory range equals the number of bytes to copy. Otherwise reports an error.
[[nodiscard]] inline bool check_block(const char *what, std::size_t participant, const block &has, std::uint64_t bytes,
                                      on_error failed) {
    auto wrong = wrong_size(what, std::string(what) + " " + std::to_string(participant), has.bytes, bytes);
    if (wrong) {
        failed.report(std::move(*wrong));
        return false;
    }
    return true;
}

/// Converts the copies (pieces) of a collective to transfers between memory ranges. If `from` or `to` has only one
/// range, all participants use it.
[[nodiscard]] inline std::vector<transfer> transfers_of(const std::vector<mp_piece_t> &pieces,
                                                        const std::vector<block> &from, const std::vector<block> &to) {
    std::vector<transfer> transfers;
    for (const mp_piece_t &piece : pieces) {
        const block &source = from[from.size() == 1 ? 0 : piece.from];
        const block &target = to[to.size() == 1 ? 0 : piece.to];
        const char *src = static_cast<const char *>(source.memory) + piece.send_offset;
        // The memory range was created from writable memory, so the cast is valid.
        // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
        char *dst = static_cast<char *>(const_cast<void *>(target.memory)) + piece.receive_offset;
        if (src != dst) {
            transfers.push_back({dst, target.device, src, source.device, piece.bytes});
        }
    }
    return transfers;
}

/// Returns the tag of a collective's descriptors. It is one of the highest numbers, so that it differs from the tags
/// that programs usually choose.
[[nodiscard]] constexpr std::uint64_t collective_tag(mp_collective_t collective) noexcept {
    return ~static_cast<std::uint64_t>(collective);
}

/// Returns a rank's send and receive descriptors for the copies (pieces) of a collective.
[[nodiscard]] inline std::vector<half_transfer> halves_of(mp_collective_t collective,
                                                          const std::vector<mp_piece_t> &pieces, std::uint32_t rank,
                                                          const void *send, void *receive) {
    std::vector<half_transfer> halves;
    for (const mp_piece_t &piece : pieces) {
        // The memory is only read. NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
        char *src = static_cast<char *>(const_cast<void *>(send)) + piece.send_offset;
        char *dst = static_cast<char *>(receive) + piece.receive_offset;
        if (piece.from == rank && piece.to == rank && src == dst) {
            continue;
        }
        if (piece.from == rank) {
            halves.push_back({{src, piece.bytes}, static_cast<int>(piece.to), collective_tag(collective), true});
        }
        if (piece.to == rank) {
            halves.push_back({{dst, piece.bytes}, static_cast<int>(piece.from), collective_tag(collective), false});
        }
    }
    return halves;
}

/// List of sizes in bytes, and their sum, which must fit into 64 bits.
class byte_sizes {
  public:
    /// Converts `count` sizes from `elements` of `element_bytes` bytes each. If `elements` is empty, every size is
    /// `each`. `wrong` returns an error of the sizes.
    byte_sizes(const char *argument, array_view<const std::size_t> elements, std::size_t count, std::size_t each,
               std::size_t element_bytes)
        : sizes_(count, 0) {
        if (!elements.empty() && elements.size() != count) {
            refuse(argument, std::string(argument) + " has " + std::to_string(elements.size()) + " sizes, and " +
                                 std::to_string(count) + " are needed: pass one for each rank, or none");
            return;
        }
        for (std::size_t at = 0; at < count; ++at) {
            const std::uint64_t number = elements.empty() ? each : elements[at];
            if (number > (most - sum_) / element_bytes) {
                refuse(argument, std::string(argument) + "[" + std::to_string(at) + "] is " + std::to_string(number) +
                                     " elements of " + std::to_string(element_bytes) +
                                     " bytes: together with the sizes before it, more bytes than an address can count");
                return;
            }
            sizes_[at] = number * element_bytes;
            sum_ += sizes_[at];
        }
    }

    /// Returns the error in the list of sizes, if there is one.
    [[nodiscard]] std::optional<error_details> &wrong() noexcept { return wrong_; }
    /// Returns all sizes, bytes.
    [[nodiscard]] const std::vector<std::uint64_t> &get() const noexcept { return sizes_; }
    /// Returns the size at index `at`, bytes.
    [[nodiscard]] std::uint64_t operator[](std::size_t at) const { return sizes_[at]; }
    /// Returns the sum of all sizes, bytes.
    [[nodiscard]] std::uint64_t sum() const noexcept { return sum_; }

  private:
    static constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();

    void refuse(const char *argument, std::string reason) {
        wrong_ = error_details{status::invalid_argument, 0, argument, std::move(reason)};
    }

    std::vector<std::uint64_t> sizes_;
    std::uint64_t sum_ = 0;
    std::optional<error_details> wrong_;
};

/// Returns the sum of sizes.
[[nodiscard]] inline std::uint64_t sum_of(const std::vector<std::uint64_t> &sizes) noexcept {
    return std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
}

/// Reports an error in the arguments of this rank, and notifies the other ranks. Their current or next call of
/// `node::plan_exchange` fails with the reason.
[[nodiscard]] inline std::vector<half_transfer> refuse_part(const node &ranks, error_details wrong, on_error failed) {
    static_cast<void>(mp_node_fail(ranks.get(), wrong.message.c_str()));
    failed.report(std::move(wrong));
    return {};
}

/// Returns this rank's descriptors for a collective. `sizes` contains the sizes of its blocks in bytes.
[[nodiscard]] inline std::vector<half_transfer> halves_of_sizes(mp_collective_t collective, const node &ranks, int root,
                                                                const std::vector<std::uint64_t> &sizes,
                                                                const void *send, void *receive, on_error failed) {
    std::error_code ec;
    const auto pieces =
        pieces_of(collective, static_cast<std::size_t>(ranks.size()), static_cast<std::uint32_t>(root), sizes, ec);
    if (ec) {
        return refuse_part(ranks, last_error(), failed);
    }
    failed.report(MP_SUCCESS);
    return halves_of(collective, pieces, static_cast<std::uint32_t>(ranks.rank()), send, receive);
}

/// Returns a rank's descriptors for a scatter, a gather or an all-gather. The source of a scatter and the destination
/// of a gather contain all blocks on the root. The destination of an all-gather contains all blocks on every rank.
template <class T>
[[nodiscard]] std::vector<half_transfer> halves_of_blocks(mp_collective_t collective, const node &ranks, int root,
                                                          device_span<const T> from, device_span<T> to,
                                                          array_view<const std::size_t> elements, on_error failed) {
    if (!ranks) {
        fail_empty("node");
    }
    const bool scatters = collective == MP_SCATTER;
    const char *const whole = scatters ? "source" : "destination";
    const char *const part = scatters ? "destination" : "source";
    const std::uint64_t whole_bytes = scatters ? from.size_bytes() : to.size_bytes();
    const std::uint64_t part_bytes = scatters ? to.size_bytes() : from.size_bytes();
    byte_sizes sizes("elements", elements, static_cast<std::size_t>(ranks.size()), scatters ? to.size() : from.size(),
                     sizeof(T));
    auto wrong = std::move(sizes.wrong());
    if (!wrong) {
        wrong = wrong_size(part, std::string("the ") + part, part_bytes, sizes[static_cast<std::size_t>(ranks.rank())]);
    }
    if (!wrong && (collective == MP_ALL_GATHER || ranks.rank() == root)) {
        wrong = wrong_size(whole, std::string("the ") + whole, whole_bytes, sizes.sum());
    }
    return wrong ? refuse_part(ranks, std::move(*wrong), failed)
                 : halves_of_sizes(collective, ranks, root, sizes.get(), from.data(), to.data(), failed);
}

} // namespace detail

/// Broadcast within one process: returns the transfers that copy all of `source` to each of `destinations`, a container
/// of buffers or spans. Throws `argument_error` if the size of a destination differs from the size of `source`.
template <class Source, class Ends>
[[nodiscard]] std::vector<transfer> broadcast(Source &&source, Ends &&destinations, on_error failed = {}) {
    const std::vector<detail::block> from{detail::block_of(source)}, to = detail::blocks_of(destinations);
    for (std::size_t at = 0; at < to.size(); ++at) {
        if (!detail::check_block("destination", at, to[at], from[0].bytes, failed)) {
            return {};
        }
    }
    return to.empty()
               ? std::vector<transfer>{}
               : detail::transfers_of(detail::pieces_of(MP_BROADCAST, to.size(), 0, {from[0].bytes}, failed), from, to);
}

/// Scatter within one process: returns the transfers that copy consecutive parts of `source` to `destinations`. The sum
/// of the sizes of the destinations must equal the size of `source`. Throws `argument_error`.
template <class Source, class Ends>
[[nodiscard]] std::vector<transfer> scatter(Source &&source, Ends &&destinations, on_error failed = {}) {
    const std::vector<detail::block> from{detail::block_of(source)}, to = detail::blocks_of(destinations);
    const std::vector<std::uint64_t> sizes = detail::sizes_of(to);
    if (!detail::check_block("source", 0, from[0], detail::sum_of(sizes), failed)) {
        return {};
    }
    return to.empty() ? std::vector<transfer>{}
                      : detail::transfers_of(detail::pieces_of(MP_SCATTER, to.size(), 0, sizes, failed), from, to);
}

/// Gather within one process: returns the transfers that copy all of `sources` to consecutive parts of `destination`.
/// The size of `destination` must equal the sum of the sizes of `sources`. Throws `argument_error`.
template <class Ends, class Destination>
[[nodiscard]] std::vector<transfer> gather(Ends &&sources, Destination &&destination, on_error failed = {}) {
    const std::vector<detail::block> from = detail::blocks_of(sources), to{detail::block_of(destination)};
    const std::vector<std::uint64_t> sizes = detail::sizes_of(from);
    if (!detail::check_block("destination", 0, to[0], detail::sum_of(sizes), failed)) {
        return {};
    }
    return from.empty() ? std::vector<transfer>{}
                        : detail::transfers_of(detail::pieces_of(MP_GATHER, from.size(), 0, sizes, failed), from, to);
}

/// All-gather within one process: returns the transfers that copy all of `sources` to each of `destinations`. There are
/// as many destinations as sources. The size of each destination must equal the sum of the sizes of `sources`. Throws
/// `argument_error`.
template <class Sources, class Destinations>
[[nodiscard]] std::vector<transfer> all_gather(Sources &&sources, Destinations &&destinations, on_error failed = {}) {
    const std::vector<detail::block> from = detail::blocks_of(sources), to = detail::blocks_of(destinations);
    const std::vector<std::uint64_t> sizes = detail::sizes_of(from);
    if (from.size() != to.size()) {
        failed.report({status::invalid_argument, 0, "destinations",
                       std::to_string(to.size()) + " destinations for " + std::to_string(from.size()) +
                           " sources: each participant must have one source and one destination"});
        return {};
    }
    for (std::size_t at = 0; at < to.size(); ++at) {
        if (!detail::check_block("destination", at, to[at], detail::sum_of(sizes), failed)) {
            return {};
        }
    }
    return detail::transfers_of(detail::pieces_of(MP_ALL_GATHER, from.size(), 0, sizes, failed), from, to);
}

/// All-to-all within one process: returns the transfers that copy one part of each of `sources` to each of
/// `destinations`. There are as many destinations as sources. `elements` is a list of the number of elements for each
/// pair of sender and receiver, ordered by sender. If the list is empty, all parts of a source have equal size. Throws
/// `argument_error`.
template <class Sources, class Destinations,
          std::enable_if_t<!std::is_base_of_v<node, std::remove_reference_t<Sources>>, int> = 0>
[[nodiscard]] std::vector<transfer> all_to_all(Sources &&sources, Destinations &&destinations,
                                               array_view<const std::size_t> elements = {}, on_error failed = {}) {
    const std::vector<detail::block> from = detail::blocks_of(sources), to = detail::blocks_of(destinations);
    const std::size_t count = from.size();
    if (count != to.size() || (!elements.empty() && elements.size() != count * count)) {
        failed.report({status::invalid_argument, 0, "destinations",
                       std::to_string(to.size()) + " destinations and " + std::to_string(elements.size()) +
                           " sizes for " + std::to_string(count) +
                           " sources: pass as many destinations as sources, and one size for each " +
                           "pair of them, or none"});
        return {};
    }
    std::size_t element = 1;
    for (auto &&source : sources) {
        element = sizeof(*detail::as_device_span(source).data());
    }
    detail::byte_sizes given("elements", elements, count * count, 0, element);
    if (given.wrong()) {
        failed.report(std::move(*given.wrong()));
        return {};
    }
    std::vector<std::uint64_t> sizes(count * count), sent(count), received(count);
    for (std::size_t at = 0; at < sizes.size(); ++at) {
        sizes[at] = elements.empty() ? from[at / count].bytes / count : given[at];
        sent[at / count] += sizes[at];
        received[at % count] += sizes[at];
    }
    for (std::size_t at = 0; at < count; ++at) {
        if (!detail::check_block("source", at, from[at], sent[at], failed)) {
            return {};
        }
        if (!detail::check_block("destination", at, to[at], received[at], failed)) {
            return {};
        }
    }
    return detail::transfers_of(detail::pieces_of(MP_ALL_TO_ALL, count, 0, sizes, failed), from, to);
}

/// Broadcast between the ranks of a node: returns this rank's descriptors. The plan copies `elements` of the root to
/// `elements` of all other ranks. `elements` has the same size on all ranks. Pass the descriptors to
/// `node::plan_exchange`.
///
/// All functions that return descriptors of a collective throw `argument_error` in these cases: the node is empty, the
/// root is not a rank, the size of memory differs from the number of bytes to copy, or a list of sizes does not have
/// one entry per rank or has a sum that overflows. The current or next `plan_exchange` of the other ranks then fails
/// with `rank_failed` and the reason.
template <class Elements>
[[nodiscard]] std::vector<half_transfer> broadcast(const node &ranks, int root, Elements &&elements,
                                                   on_error failed = {}) {
    if (!ranks) {
        detail::fail_empty("node");
    }
    const auto span = detail::as_device_span(elements);
    return detail::halves_of_sizes(MP_BROADCAST, ranks, root, {span.size_bytes()}, span.data(), span.data(), failed);
}

/// Scatter between the ranks of a node: returns this rank's descriptors for `node::plan_exchange`. The plan copies one
/// part of the root's `source` to `destination` of each rank.
///
/// `elements` is a list of the number of elements that each rank receives. The list is equal on all ranks. If the list
/// is empty, every rank receives as many elements as this rank. Only the root uses `source`. The size of `source` is
/// the sum of all parts. Throws the exceptions of `broadcast`.
template <class Source, class Destination>
[[nodiscard]] std::vector<half_transfer> scatter(const node &ranks, int root, Source &&source,
                                                 Destination &&destination, array_view<const std::size_t> elements = {},
                                                 on_error failed = {}) {
    const auto to = detail::as_device_span(destination);
    return detail::halves_of_blocks<typename decltype(to)::element_type>(
        MP_SCATTER, ranks, root, detail::as_device_span(source), to, elements, failed);
}

/// Gather between the ranks of a node: returns this rank's descriptors for `node::plan_exchange`. The plan copies
/// `source` of each rank to the root's `destination`.
///
/// `elements` is a list of the number of elements that each rank sends. The list is equal on all ranks. If the list is
/// empty, every rank sends as many elements as this rank. Only the root uses `destination`. The size of `destination`
/// is the sum of all parts. Throws the exceptions of `broadcast`.
template <class Source, class Destination>
[[nodiscard]] std::vector<half_transfer> gather(const node &ranks, int root, Source &&source, Destination &&destination,
                                                array_view<const std::size_t> elements = {}, on_error failed = {}) {
    const auto to = detail::as_device_span(destination);
    return detail::halves_of_blocks<typename decltype(to)::element_type>(
        MP_GATHER, ranks, root, detail::as_device_span(source), to, elements, failed);
}

/// All-gather between the ranks of a node: returns this rank's descriptors for `node::plan_exchange`. The plan copies
/// `source` of each rank to `destination` of all ranks.
///
/// `elements` is a list of the number of elements that each rank sends. The list is equal on all ranks. If the list is
/// empty, every rank sends as many elements as this rank. Throws the exceptions of `broadcast`.
template <class Source, class Destination>
[[nodiscard]] std::vector<half_transfer> all_gather(const node &ranks, Source &&source, Destination &&destination,
                                                    array_view<const std::size_t> elements = {}, on_error failed = {}) {
    const auto to = detail::as_device_span(destination);
    return detail::halves_of_blocks<typename decltype(to)::element_type>(
        MP_ALL_GATHER, ranks, 0, detail::as_device_span(source), to, elements, failed);
}

/// All-to-all between the ranks of a node: returns this rank's descriptors for `node::plan_exchange`. The plan copies
/// one part of `source` to each rank, and one part from each rank to `destination`.
///
/// `sent` and `received` are lists of the number of elements sent to and received from each rank. If a list is empty,
/// its parts have equal size. If the sizes of a sender and its receiver differ, planning fails on all ranks, and the
/// error text names both ranks. Throws the exceptions of `broadcast`.
template <class Source, class Destination>
[[nodiscard]] std::vector<half_transfer> all_to_all(const node &ranks, Source &&source, Destination &&destination,
                                                    array_view<const std::size_t> sent = {},
                                                    array_view<const std::size_t> received = {}, on_error failed = {}) {
    const auto from_span = detail::as_device_span(source);
    const auto to_span = detail::as_device_span(destination);
    using element = typename decltype(to_span)::element_type;
    if (!ranks) {
        detail::fail_empty("node");
    }
    const auto count = static_cast<std::size_t>(ranks.size());
    detail::byte_sizes to("sent", sent, count, from_span.size() / count, sizeof(element));
    detail::byte_sizes from("received", received, count, to_span.size() / count, sizeof(element));
    auto wrong = std::move(to.wrong() ? to.wrong() : from.wrong());
    if (!wrong) {
        wrong = detail::wrong_size("source", "the source", from_span.size_bytes(), to.sum());
    }
    if (!wrong) {
        wrong = detail::wrong_size("destination", "the destination", to_span.size_bytes(), from.sum());
    }
    if (wrong) {
        return detail::refuse_part(ranks, std::move(*wrong), failed);
    }
    std::vector<mp_piece_t> pieces;
    const auto rank = static_cast<std::uint32_t>(ranks.rank());
    std::uint64_t send_offset = 0, receive_offset = 0;
    for (std::uint32_t other = 0; other < count; ++other) {
        if (other != rank || to[other] != from[other]) {
            if (to[other] > 0) {
                pieces.push_back({rank, other, send_offset, 0, to[other]});
            }
            if (from[other] > 0) {
                pieces.push_back({other, rank, 0, receive_offset, from[other]});
            }
        } else if (to[other] > 0) {
            pieces.push_back({rank, rank, send_offset, receive_offset, to[other]});
        }
        send_offset += to[other];
        receive_offset += from[other];
    }
    return detail::halves_of(MP_ALL_TO_ALL, pieces, rank, from_span.data(), to_span.data());
}

} // namespace mpgpu

#endif // MPGPU_COLLECTIVE_HPP
