// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_COLLECTIVE_HPP
#define MPGPU_COLLECTIVE_HPP

/// @file
/// Named batches: `broadcast`, `scatter`, `gather`, `all_gather` and `all_to_all`, as transfers between devices of a
/// process or as half-transfers of a rank. Copies alone: nothing is reduced. Planned together, bytes that several want
/// are passed on by those who have them.
///
/// @code
/// mpgpu::plan weights(ctx, mpgpu::broadcast(model, copies));       // one process; made once, or each time by a
/// look-up weights.enqueue(stream); mpgpu::plan steps = node.plan_exchange(mpgpu::all_gather(node, own, all));  //
/// ranks; all call it together steps.enqueue(stream);                                                      // every
/// step
/// @endcode
///
/// Blocks of several participants lie one behind the other, in the participants' order. What lies where it is to go
/// already (a block of `all_gather` inside of the participant's own destination, as with `MPI_IN_PLACE`) is not copied.
/// An all-to-all in place would need memory of its own: it is refused when it is planned.

#include <mpgpu/error.hpp>
#include <mpgpu/node.hpp>
#include <mpgpu/span.hpp>
#include <mpgpu/transfer.hpp>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

namespace mpgpu {

namespace detail {

/// The pieces of a collective whose blocks have so many bytes each.
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

/// A block of memory, without the type of its elements.
struct block {
    const void *memory;  ///< its first byte
    std::int32_t device; ///< where it lies
    std::uint64_t bytes; ///< its size
};

/// Of a container of buffers or spans.
template <class Ends> [[nodiscard]] std::vector<block> blocks_of(Ends &&ends) {
    std::vector<block> blocks;
    for (auto &&end : ends) {
        const auto span = as_device_span(end);
        blocks.push_back({span.data(), span.location().id(), span.size_bytes()});
    }
    return blocks;
}
/// Of a buffer or a span.
template <class End> [[nodiscard]] block block_of(End &&end) {
    const auto span = as_device_span(end);
    return {span.data(), span.location().id(), span.size_bytes()};
}

/// Bytes of each.
[[nodiscard]] inline std::vector<std::uint64_t> sizes_of(const std::vector<block> &blocks) {
    std::vector<std::uint64_t> sizes(blocks.size());
    for (std::size_t at = 0; at < blocks.size(); ++at) {
        sizes[at] = blocks[at].bytes;
    }
    return sizes;
}

/// Whether a block has as many bytes as move there. One that has not is reported.
[[nodiscard]] inline bool check_block(const char *what, std::size_t participant, const block &has, std::uint64_t bytes,
                                      on_error failed) {
    if (has.bytes != bytes) {
        failed.report({status::invalid_argument, 0, what,
                       std::string(what) + " " + std::to_string(participant) + " has " + std::to_string(has.bytes) +
                           " bytes, and " + std::to_string(bytes) + " move there: take a span of that size"});
    }
    return has.bytes == bytes;
}

/// The transfers of pieces between blocks; one block alone is everybody's.
[[nodiscard]] inline std::vector<transfer> transfers_of(const std::vector<mp_piece_t> &pieces,
                                                        const std::vector<block> &from, const std::vector<block> &to) {
    std::vector<transfer> transfers;
    for (const mp_piece_t &piece : pieces) {
        const block &source = from[from.size() == 1 ? 0 : piece.from];
        const block &target = to[to.size() == 1 ? 0 : piece.to];
        const char *src = static_cast<const char *>(source.memory) + piece.send_offset;
        // The destination was writable when its block was taken. NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
        char *dst = static_cast<char *>(const_cast<void *>(target.memory)) + piece.receive_offset;
        if (src != dst) {
            transfers.push_back({dst, target.device, src, source.device, piece.bytes});
        }
    }
    return transfers;
}

/// The tag of the halves of collectives, which is no tag of a program's own unless it takes the highest.
[[nodiscard]] constexpr std::uint64_t collective_tag(mp_collective_t collective) noexcept {
    return ~static_cast<std::uint64_t>(collective);
}

/// A rank's halves of pieces.
[[nodiscard]] inline std::vector<half_transfer> halves_of(mp_collective_t collective,
                                                          const std::vector<mp_piece_t> &pieces, std::uint32_t rank,
                                                          const void *send, void *receive) {
    std::vector<half_transfer> halves;
    for (const mp_piece_t &piece : pieces) {
        // It is only read. NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
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

/// Sizes in bytes: those of each participant, or as many times one.
template <class T>
[[nodiscard]] std::vector<std::uint64_t> byte_sizes(array_view<const std::size_t> elements, std::size_t participants,
                                                    std::size_t each) {
    std::vector<std::uint64_t> sizes(participants, each * sizeof(T));
    for (std::size_t at = 0; at < elements.size() && at < participants; ++at) {
        sizes[at] = elements[at] * sizeof(T);
    }
    return sizes;
}

/// All together.
[[nodiscard]] inline std::uint64_t sum_of(const std::vector<std::uint64_t> &sizes) noexcept {
    return std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0});
}

/// A rank's halves of a scatter, a gather or an all-gather. The source of the one and the destination of the others has
/// all blocks: on the root, or on all.
template <class T>
[[nodiscard]] std::vector<half_transfer> halves_of_blocks(mp_collective_t collective, const node &ranks, int root,
                                                          device_span<const T> from, device_span<T> to,
                                                          array_view<const std::size_t> elements, on_error failed) {
    const auto count = static_cast<std::size_t>(ranks.size());
    const bool scatters = collective == MP_SCATTER;
    const auto sizes = byte_sizes<T>(elements, count, scatters ? to.size() : from.size());
    const block whole = scatters ? block_of(from) : block_of(to);
    const bool has_whole = collective == MP_ALL_GATHER || ranks.rank() == root;
    if (has_whole && !check_block(scatters ? "source" : "destination", 0, whole, sum_of(sizes), failed)) {
        return {};
    }
    const auto pieces = pieces_of(collective, count, static_cast<std::size_t>(root), sizes, failed);
    return halves_of(collective, pieces, static_cast<std::uint32_t>(ranks.rank()), from.data(), to.data());
}

} // namespace detail

/// All of `source` to each of `destinations`, a container of buffers or spans, each of the same size. Throws
/// `argument_error`, which names the one that has another.
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

/// Of `source` its part to each of `destinations`, which together have its size. Throws `argument_error`.
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

/// All of `sources` into `destination`, which has their size together. Throws `argument_error`.
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

/// All of `sources` into each of `destinations`, as many, each with the size of all sources together. Throws
/// `argument_error`.
template <class Sources, class Destinations>
[[nodiscard]] std::vector<transfer> all_gather(Sources &&sources, Destinations &&destinations, on_error failed = {}) {
    const std::vector<detail::block> from = detail::blocks_of(sources), to = detail::blocks_of(destinations);
    const std::vector<std::uint64_t> sizes = detail::sizes_of(from);
    if (from.size() != to.size()) {
        failed.report({status::invalid_argument, 0, "destinations",
                       std::to_string(to.size()) + " destinations for " + std::to_string(from.size()) +
                           " sources: each participant has one of both"});
        return {};
    }
    for (std::size_t at = 0; at < to.size(); ++at) {
        if (!detail::check_block("destination", at, to[at], detail::sum_of(sizes), failed)) {
            return {};
        }
    }
    return detail::transfers_of(detail::pieces_of(MP_ALL_GATHER, from.size(), 0, sizes, failed), from, to);
}

/// Of each of `sources` its part to each of `destinations`, as many. `elements` says how many each sends each, sender
/// by sender; without it all parts of a source are of one size. Throws `argument_error`.
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
                           " sources: as many destinations, and a size of each " + "for each or none"});
        return {};
    }
    std::size_t element = 1;
    for (auto &&source : sources) {
        element = sizeof(*detail::as_device_span(source).data());
    }
    std::vector<std::uint64_t> sizes(count * count), sent(count), received(count);
    for (std::size_t at = 0; at < sizes.size(); ++at) {
        sizes[at] = elements.empty() ? from[at / count].bytes / count : elements[at] * element;
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

/// This rank's part of a broadcast in a node: `elements` of the root to those of all others, of the same size. For
/// `node::plan_exchange`, as what follows.
template <class Elements>
[[nodiscard]] std::vector<half_transfer> broadcast(const node &ranks, int root, Elements &&elements,
                                                   on_error failed = {}) {
    const auto span = detail::as_device_span(elements);
    const auto pieces = detail::pieces_of(MP_BROADCAST, static_cast<std::size_t>(ranks.size()),
                                          static_cast<std::size_t>(root), {span.size_bytes()}, failed);
    return detail::halves_of(MP_BROADCAST, pieces, static_cast<std::uint32_t>(ranks.rank()), span.data(), span.data());
}

/// This rank's part of a scatter: of the root's `source` a part into `destination` of each. `elements` says how many
/// each receives, the same on all ranks; without it as many as this one. `source` is read on the root alone.
template <class Source, class Destination>
[[nodiscard]] std::vector<half_transfer> scatter(const node &ranks, int root, Source &&source,
                                                 Destination &&destination, array_view<const std::size_t> elements = {},
                                                 on_error failed = {}) {
    const auto to = detail::as_device_span(destination);
    return detail::halves_of_blocks<typename decltype(to)::element_type>(
        MP_SCATTER, ranks, root, detail::as_device_span(source), to, elements, failed);
}

/// This rank's part of a gather: its `source` into the root's `destination`, which is written there alone. `elements`
/// says how many each sends, the same on all ranks; without it as many as this one.
template <class Source, class Destination>
[[nodiscard]] std::vector<half_transfer> gather(const node &ranks, int root, Source &&source, Destination &&destination,
                                                array_view<const std::size_t> elements = {}, on_error failed = {}) {
    const auto to = detail::as_device_span(destination);
    return detail::halves_of_blocks<typename decltype(to)::element_type>(
        MP_GATHER, ranks, root, detail::as_device_span(source), to, elements, failed);
}

/// This rank's part of an all-gather: `source` of each into `destination` of all. `elements` as for `gather`.
template <class Source, class Destination>
[[nodiscard]] std::vector<half_transfer> all_gather(const node &ranks, Source &&source, Destination &&destination,
                                                    array_view<const std::size_t> elements = {}, on_error failed = {}) {
    const auto to = detail::as_device_span(destination);
    return detail::halves_of_blocks<typename decltype(to)::element_type>(
        MP_ALL_GATHER, ranks, 0, detail::as_device_span(source), to, elements, failed);
}

/// This rank's part of an all-to-all: of `source` a part to each, and a part of each into `destination`. `sent` and
/// `received` say how many elements go to each and come from each; without them all parts are of one size. Where two
/// ranks differ, the plan is refused on all with the two that do.
template <class Source, class Destination>
[[nodiscard]] std::vector<half_transfer> all_to_all(const node &ranks, Source &&source, Destination &&destination,
                                                    array_view<const std::size_t> sent = {},
                                                    array_view<const std::size_t> received = {}, on_error failed = {}) {
    const auto from_span = detail::as_device_span(source);
    const auto to_span = detail::as_device_span(destination);
    using element = typename decltype(to_span)::element_type;
    const auto count = static_cast<std::size_t>(ranks.size());
    const auto to = detail::byte_sizes<element>(sent, count, from_span.size() / count);
    const auto from = detail::byte_sizes<element>(received, count, to_span.size() / count);
    if (!detail::check_block("source", 0, detail::block_of(from_span), detail::sum_of(to), failed)) {
        return {};
    }
    if (!detail::check_block("destination", 0, detail::block_of(to_span), detail::sum_of(from), failed)) {
        return {};
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
