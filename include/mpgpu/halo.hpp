// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_HPP
#define MPGPU_HALO_HPP

/// @file
/// Halo exchange on structured grids of one, two and three dimensions: a header over mpgpu.hpp and nothing else.
///
/// @code
/// mpgpu::halo::grid grid;
/// grid.cells = {256, 256, 256};                                     // of the whole mesh; x is contiguous
/// grid.ranks = {1, 2, 2};
/// grid.periodic = {true, true, true};
/// grid.ghost = {1, 1, 1};
/// std::vector<mpgpu::halo::rank_arrays> arrays(mpgpu::halo::rank_count(grid));
/// arrays[r] = {mpgpu::halo::array_of(density[r]), mpgpu::halo::array_of(energy[r])};
///
/// mpgpu::halo::plan halo(ctx, grid, arrays);                        // once
/// halo.exchange(stream);                                            // every time step; or, around other work:
/// halo.start(stream);  interior(stream);  halo.finish(stream);  boundary(stream);
/// @endcode
///
/// A rank's array of a variable has `extents(grid, rank)` elements, ghost cells included, without padding, x fastest.
/// Each exchange copies the outermost computed cells of every neighbour into the ghost cells on that side. What lies in
/// one piece in both arrays goes straight into the neighbour's ghost cells. All else is packed into one message for
/// each pair of ranks, which travels as one transfer and is unpacked by the receiver.
///
/// Pack and unpack are CPU loops in stream order on the host backend. On CUDA they are a kernel, which the caller's
/// nvcc compiles: the one of mpgpu/halo.cuh, or the caller's own, see `copier`. A plan that needs it and has none is
/// refused.
///
/// Include <mpgpu/mpi.hpp> before this header, and there is also `make_plan`: one process for each rank.
///
/// Errors are thrown, as in mpgpu.hpp.

#include <mpgpu/mpgpu.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace mpgpu::halo {

// ---- the grid ------------------------------------------------------------------------

/// Which neighbours take part: those that differ in at most one, two or three dimensions.
enum class neighbours : std::int32_t {
    faces = 1,  ///< 6 in three dimensions
    edges = 2,  ///< and those across edges: 18
    corners = 3 ///< and those across corners: 26
};

/// A mesh and its division among ranks. Dimensions are x, y, z, and x is contiguous in memory. A dimension that a
/// problem does not have is left as it is: one cell, no ghost cells. A plain value.
struct grid {
    /// Cells of the whole mesh, without ghost cells.
    std::array<std::int64_t, 3> cells = {1, 1, 1};
    /// Ranks in each dimension. Rank (x, y, z) has the number x + ranks[0] * (y + ranks[1] * z).
    std::array<int, 3> ranks = {1, 1, 1};
    /// Whether the last cell of a dimension is followed by the first.
    std::array<bool, 3> periodic = {false, false, false};
    /// Ghost cells at either end of each dimension: at most as many as any rank has cells there.
    std::array<std::int64_t, 3> ghost = {0, 0, 0};
    /// Whose cells are wanted. Ghost cells of other neighbours, and those outside a mesh that is not periodic, are left
    /// alone.
    neighbours reach = neighbours::corners;
};

/// A range of cells: of the whole mesh, or of one array.
struct box {
    std::array<std::int64_t, 3> first = {0, 0, 0};
    std::array<std::int64_t, 3> cells = {0, 0, 0};
};

/// How many ranks a grid has.
[[nodiscard]] constexpr int rank_count(const grid &g) noexcept {
    return g.ranks[0] * g.ranks[1] * g.ranks[2];
}

/// Where a rank lies in the rank grid.
[[nodiscard]] constexpr std::array<int, 3> place_of(const grid &g, int rank) noexcept {
    return {rank % g.ranks[0], rank / g.ranks[0] % g.ranks[1], rank / g.ranks[0] / g.ranks[1]};
}

/// The cells of the mesh that a rank computes: as equal parts as possible, the first ones having the extra cells.
[[nodiscard]] constexpr box box_of(const grid &g, int rank) noexcept {
    const std::array<int, 3> place = place_of(g, rank);
    box own;
    for (std::size_t d = 0; d < 3; ++d) {
        const std::int64_t least = g.cells[d] / g.ranks[d];
        const std::int64_t extra = g.cells[d] % g.ranks[d];
        own.first[d] = place[d] * least + (place[d] < extra ? place[d] : extra);
        own.cells[d] = least + (place[d] < extra ? 1 : 0);
    }
    return own;
}

/// Elements of a rank's arrays in each dimension, ghost cells included.
[[nodiscard]] constexpr std::array<std::int64_t, 3> extents(const grid &g, int rank) noexcept {
    const box own = box_of(g, rank);
    return {own.cells[0] + 2 * g.ghost[0], own.cells[1] + 2 * g.ghost[1], own.cells[2] + 2 * g.ghost[2]};
}

// ---- arrays --------------------------------------------------------------------------

/// One variable of one rank. Owns nothing.
struct array {
    void *data;
    device location;
    std::size_t element_bytes;
    std::size_t size; ///< elements
};

/// The variables of one rank, all on one device. All ranks have the same variables in the same order.
using rank_arrays = std::vector<array>;

/// A `buffer` or a `device_span` as a variable; the elements are of any trivially copyable type.
template <class Elements> [[nodiscard]] array array_of(Elements &&elements) noexcept {
    const auto whole = mpgpu::detail::as_device_span(elements);
    using element = typename decltype(whole)::element_type;
    static_assert(!std::is_const_v<element>, "mpgpu: ghost cells are written");
    return {whole.data(), whole.location(), sizeof(element), whole.size()};
}

// ---- pack and unpack -----------------------------------------------------------------

/// A box of cells of one array and the same cells in one piece in a message. A plain value, which a kernel can take.
/// Cell (x, y, z) lies at `cells + x * element_bytes + y * row_bytes + z * plane_bytes`, and in the message at
/// `message + ((z * count[1] + y) * count[0] + x) * element_bytes`. `message` is aligned to 16 bytes.
struct piece {
    std::byte *cells;
    std::byte *message;
    std::uint64_t element_bytes;
    std::uint64_t count[3];    ///< cells of the box; no std::array, which device code may not index
    std::uint64_t row_bytes;   ///< from a row of the array to the next
    std::uint64_t plane_bytes; ///< from a plane of the array to the next
};

/// Which way `launch` copies.
enum class direction : std::int32_t {
    pack,  ///< from the cells into the message
    unpack ///< from the message into the cells
};

/// Enqueues the copies of a set of pieces, in either a kernel or a host function; called once in each exchange.
using launch = std::function<void(stream_view)>;

/// Makes a `launch` for pieces of one device. Called when a plan is made, at most twice for each rank. The pieces lie
/// in host memory and are gone after the call: a copier for CUDA copies them to the device. Pieces do not overlap. The
/// stream that the `launch` is called with is of that device.
using copier = std::function<launch(const context &, device, span<const piece>, direction)>;

/// Copies pieces on the calling thread; for arrays and messages that the CPU reaches.
inline void copy_on_cpu(span<const piece> pieces, direction way) noexcept {
    for (const piece &p : pieces) {
        const std::uint64_t bytes = p.count[0] * p.element_bytes;
        std::byte *message = p.message;
        for (std::uint64_t z = 0; z < p.count[2]; ++z) {
            for (std::uint64_t y = 0; y < p.count[1]; ++y, message += bytes) {
                std::byte *row = p.cells + z * p.plane_bytes + y * p.row_bytes;
                std::byte *to = way == direction::pack ? message : row;
                const std::byte *from = way == direction::pack ? row : message;
                if (bytes == sizeof(std::uint64_t)) { // one cell of the faces in x: a call for each would cost more
                    std::memcpy(to, from, sizeof(std::uint64_t));
                } else {
                    std::memcpy(to, from, bytes);
                }
            }
        }
    }
}

/// How to exchange.
struct options {
    /// Cells that two ranks exchange over one face, edge or corner go straight into the ghost cells, unpacked, where
    /// they lie in at most this many pieces; each piece of each variable is a transfer. 0: always pack. The largest
    /// value: never pack.
    std::uint64_t direct_pieces = 1;
    /// Packs and unpacks; empty: CPU loops, which only the host backend can use.
    copier copy;
    /// How the transfers are planned.
    plan_options transfers;
};

namespace detail {

using mpgpu::detail::check;
using mpgpu::detail::fail;

[[nodiscard]] inline error_details refusal(mp_status_t status, std::string argument, std::string message) {
    return {status, 0, std::move(argument), std::move(message)};
}

[[nodiscard]] inline error_details invalid(std::string argument, std::string message) {
    return refusal(MP_ERROR_INVALID_ARGUMENT, std::move(argument), std::move(message));
}

/// The product, unless it is more than a size of memory can be.
[[nodiscard]] inline std::optional<std::int64_t> product(std::int64_t a, std::int64_t b) noexcept {
    if (b != 0 && a > std::numeric_limits<std::int64_t>::max() / b) {
        return std::nullopt;
    }
    return a * b;
}

/// What is wrong with a grid.
[[nodiscard]] inline std::optional<error_details> wrong(const grid &g) {
    constexpr std::int64_t most = std::int64_t{1} << 40; // sums of a few stay far from overflow
    std::int64_t ranks = 1;
    for (std::size_t d = 0; d < 3; ++d) {
        const std::string in = std::string(" in ") + "xyz"[d] + ": ";
        if (g.cells[d] < 1 || g.cells[d] > most) {
            return invalid("grid", "cells" + in + std::to_string(g.cells[d]) + ": must be 1 to 2^40");
        }
        if (g.ranks[d] < 1 || g.ranks[d] > g.cells[d]) {
            return invalid("grid", "ranks" + in + std::to_string(g.ranks[d]) + ": must be 1 to " +
                                       std::to_string(g.cells[d]) + ", the cells there");
        }
        const bool shared = g.ranks[d] > 1 || g.periodic[d];
        const std::int64_t widest = shared ? g.cells[d] / g.ranks[d] : most;
        if (g.ghost[d] < 0 || g.ghost[d] > widest) {
            return invalid("grid", "ghost cells" + in + std::to_string(g.ghost[d]) + ": must be 0 to " +
                                       std::to_string(widest) +
                                       ", the cells of the smallest rank there; use fewer ranks in that dimension");
        }
        ranks *= g.ranks[d];
        if (ranks > std::numeric_limits<std::int32_t>::max()) {
            return invalid("grid", "more than 2^31 - 1 ranks");
        }
    }
    if (g.reach < neighbours::faces || g.reach > neighbours::corners) {
        return invalid("grid", "reach: " + std::to_string(static_cast<int>(g.reach)) + ": there is no such value");
    }
    return std::nullopt;
}

/// What is wrong with the arrays of a rank of a valid grid.
[[nodiscard]] inline std::optional<error_details> wrong(const grid &g, int rank, const rank_arrays &arrays) {
    const std::string whose = "rank " + std::to_string(rank);
    if (arrays.empty()) {
        return invalid("arrays", whose + " has no variables: give each rank one array or more");
    }
    const std::array<std::int64_t, 3> e = extents(g, rank);
    std::optional<std::int64_t> elements = product(e[0], e[1]);
    elements = elements ? product(*elements, e[2]) : elements;
    for (std::size_t v = 0; v < arrays.size(); ++v) {
        const array &one = arrays[v];
        const std::string what = whose + ", variable " + std::to_string(v) + ": ";
        if (!elements || one.size != static_cast<std::uint64_t>(*elements)) {
            return invalid("arrays", what + std::to_string(one.size) + " elements: must be " + std::to_string(e[0]) +
                                         " x " + std::to_string(e[1]) + " x " + std::to_string(e[2]) +
                                         ", ghost cells included");
        }
        if (one.data == nullptr || one.element_bytes == 0 ||
            one.element_bytes > std::numeric_limits<std::uint64_t>::max() / 2 / one.size) {
            return invalid("arrays", what + "the address is null, or elements have no size");
        }
        if (one.location != arrays[0].location) {
            return invalid("arrays", what + "lies on device " + std::to_string(one.location.id()) +
                                         ", variable 0 on device " + std::to_string(arrays[0].location.id()) +
                                         ": all of a rank must lie on one device");
        }
    }
    return std::nullopt;
}

[[nodiscard]] inline std::vector<std::size_t> element_sizes(const rank_arrays &arrays) {
    std::vector<std::size_t> sizes;
    for (const array &one : arrays) {
        sizes.push_back(one.element_bytes);
    }
    return sizes;
}

// ---- who sends what ------------------------------------------------------------------

/// Cells of one array that become ghost cells of another: the same number of cells in each dimension.
struct region {
    std::array<std::int64_t, 3> source; ///< first cell, in the sender's array
    std::array<std::int64_t, 3> ghost;  ///< first cell, in the receiver's array
    std::array<std::int64_t, 3> cells;
};

/// A region as boxes that lie in one piece in both arrays: `rows` x `planes` of them, each of `length` cells.
struct pieces_of {
    std::int64_t length;
    std::int64_t rows;
    std::int64_t planes;
};

[[nodiscard]] inline pieces_of split(const region &r, const std::array<std::int64_t, 3> &from,
                                     const std::array<std::int64_t, 3> &to) noexcept {
    const auto whole = [&](std::size_t d) { return r.cells[d] == from[d] && r.cells[d] == to[d]; };
    if (!whole(0)) {
        return {r.cells[0], r.cells[1], r.cells[2]};
    }
    if (!whole(1)) {
        return {r.cells[0] * r.cells[1], 1, r.cells[2]};
    }
    return {r.cells[0] * r.cells[1] * r.cells[2], 1, 1};
}

/// Everything that one rank sends to another, which may be itself.
struct pair {
    int from;
    int to;
    std::vector<region> direct;
    std::vector<region> packed;
    std::uint64_t bytes = 0;         ///< of the message
    std::uint64_t outbox_offset = 0; ///< of the message in the sender's outbox
    std::uint64_t inbox_offset = 0;  ///< of the message in the receiver's inbox; a rank reads its own from its outbox
};

/// All pairs of a grid, by sender, then receiver. All ranks find the same.
struct schedule {
    std::vector<pair> pairs;
    std::vector<std::uint64_t> outbox_bytes; ///< of each rank
    std::vector<std::uint64_t> inbox_bytes;  ///< of each rank
};

constexpr std::uint64_t piece_alignment = 16;
constexpr std::uint64_t message_alignment =
    256; // as mp_alloc aligns, so that messages are copied as whole allocations are

[[nodiscard]] constexpr std::uint64_t aligned(std::uint64_t bytes, std::uint64_t to) noexcept {
    return (bytes + to - 1) / to * to;
}

[[nodiscard]] inline std::uint64_t cells_of(const region &r) noexcept {
    return static_cast<std::uint64_t>(r.cells[0] * r.cells[1] * r.cells[2]);
}

/// The rank that lies `step` away in the rank grid, if there is one.
[[nodiscard]] inline std::optional<int> neighbour(const grid &g, int rank, const std::array<int, 3> &step) noexcept {
    std::array<int, 3> place = place_of(g, rank);
    for (std::size_t d = 0; d < 3; ++d) {
        place[d] += step[d];
        if (place[d] < 0 || place[d] >= g.ranks[d]) {
            if (!g.periodic[d]) {
                return std::nullopt;
            }
            place[d] = (place[d] + g.ranks[d]) % g.ranks[d];
        }
    }
    return place[0] + g.ranks[0] * (place[1] + g.ranks[1] * place[2]);
}

/// What rank `to` gets from the side `step` of it, where rank `from` is.
[[nodiscard]] inline region region_of(const grid &g, int from, int to, const std::array<int, 3> &step) noexcept {
    const box source = box_of(g, from);
    const box own = box_of(g, to);
    region r{};
    for (std::size_t d = 0; d < 3; ++d) {
        // Array index ghost[d] is the first computed cell. Without a step both ranks have the same cells.
        r.cells[d] = step[d] == 0 ? own.cells[d] : g.ghost[d];
        r.source[d] = step[d] < 0 ? source.cells[d] : g.ghost[d];
        r.ghost[d] = step[d] < 0 ? 0 : (step[d] == 0 ? g.ghost[d] : g.ghost[d] + own.cells[d]);
    }
    return r;
}

/// The directions in which a grid has neighbours.
[[nodiscard]] inline std::vector<std::array<int, 3>> steps_of(const grid &g) {
    std::vector<std::array<int, 3>> steps;
    for (int z = -1; z <= 1; ++z) {
        for (int y = -1; y <= 1; ++y) {
            for (int x = -1; x <= 1; ++x) {
                const std::array<int, 3> step = {x, y, z};
                int crossed = 0;
                bool ghosts = true;
                for (std::size_t d = 0; d < 3; ++d) {
                    crossed += step[d] != 0 ? 1 : 0;
                    ghosts = ghosts && (step[d] == 0 || g.ghost[d] > 0);
                }
                if (crossed > 0 && crossed <= static_cast<int>(g.reach) && ghosts) {
                    steps.push_back(step);
                }
            }
        }
    }
    return steps;
}

[[nodiscard]] inline schedule schedule_of(const grid &g, const std::vector<std::size_t> &element_bytes,
                                          std::uint64_t direct_pieces) {
    const auto ranks = static_cast<std::size_t>(rank_count(g));
    const std::vector<std::array<int, 3>> steps = steps_of(g);
    schedule all;
    all.outbox_bytes.assign(ranks, 0);
    all.inbox_bytes.assign(ranks, 0);
    for (int from = 0; from < static_cast<int>(ranks); ++from) {
        const std::size_t first = all.pairs.size();
        for (const std::array<int, 3> &step : steps) {
            const std::optional<int> to = neighbour(g, from, {-step[0], -step[1], -step[2]});
            if (!to) {
                continue;
            }
            auto found = std::find_if(all.pairs.begin() + static_cast<std::ptrdiff_t>(first), all.pairs.end(),
                                      [&](const pair &p) { return p.to == *to; });
            if (found == all.pairs.end()) {
                pair made{};
                made.from = from;
                made.to = *to;
                found = all.pairs.insert(found, std::move(made));
            }
            const region r = region_of(g, from, *to, step);
            const pieces_of pieces = split(r, extents(g, from), extents(g, *to));
            const bool direct = static_cast<std::uint64_t>(pieces.rows * pieces.planes) <= direct_pieces;
            (direct ? found->direct : found->packed).push_back(r);
        }
        std::sort(all.pairs.begin() + static_cast<std::ptrdiff_t>(first), all.pairs.end(),
                  [](const pair &a, const pair &b) { return a.to < b.to; });
    }
    for (pair &p : all.pairs) {
        for (const region &r : p.packed) {
            for (const std::size_t bytes : element_bytes) {
                p.bytes += aligned(cells_of(r) * bytes, piece_alignment);
            }
        }
        std::uint64_t &outbox = all.outbox_bytes[static_cast<std::size_t>(p.from)];
        std::uint64_t &inbox = all.inbox_bytes[static_cast<std::size_t>(p.to)];
        p.outbox_offset = outbox;
        outbox += aligned(p.bytes, message_alignment);
        if (p.from != p.to) {
            p.inbox_offset = inbox;
            inbox += aligned(p.bytes, message_alignment);
        }
    }
    return all;
}

/// The packed regions of a message as pieces between `message` and either end's arrays.
inline void add_pieces(std::vector<piece> &pieces, const pair &p, const grid &g, const rank_arrays &arrays,
                       std::byte *message, direction way) {
    const std::array<std::int64_t, 3> e = extents(g, way == direction::pack ? p.from : p.to);
    for (const region &r : p.packed) {
        const std::array<std::int64_t, 3> &at = way == direction::pack ? r.source : r.ghost;
        for (const array &one : arrays) {
            const auto row = static_cast<std::uint64_t>(e[0]) * one.element_bytes;
            const auto plane = static_cast<std::uint64_t>(e[1]) * row;
            std::byte *cells = static_cast<std::byte *>(one.data) +
                               static_cast<std::uint64_t>(at[0]) * one.element_bytes +
                               static_cast<std::uint64_t>(at[1]) * row + static_cast<std::uint64_t>(at[2]) * plane;
            pieces.push_back({cells,
                              message,
                              one.element_bytes,
                              {static_cast<std::uint64_t>(r.cells[0]), static_cast<std::uint64_t>(r.cells[1]),
                               static_cast<std::uint64_t>(r.cells[2])},
                              row,
                              plane});
            message += aligned(cells_of(r) * one.element_bytes, piece_alignment);
        }
    }
}

/// The transfers of the regions that go straight into the ghost cells.
inline void add_direct(std::vector<transfer> &transfers, const pair &p, const grid &g, const rank_arrays &from,
                       const rank_arrays &to) {
    const std::array<std::int64_t, 3> source = extents(g, p.from);
    const std::array<std::int64_t, 3> ghost = extents(g, p.to);
    const auto offset = [](const std::array<std::int64_t, 3> &at, const std::array<std::int64_t, 3> &e, std::int64_t y,
                           std::int64_t z) { return at[0] + e[0] * (at[1] + y + e[1] * (at[2] + z)); };
    for (const region &r : p.direct) {
        const pieces_of pieces = split(r, source, ghost);
        for (std::size_t v = 0; v < from.size(); ++v) {
            const auto bytes = static_cast<std::int64_t>(from[v].element_bytes);
            for (std::int64_t z = 0; z < pieces.planes; ++z) {
                for (std::int64_t y = 0; y < pieces.rows; ++y) {
                    transfer copy{};
                    copy.dst = static_cast<std::byte *>(to[v].data) + offset(r.ghost, ghost, y, z) * bytes;
                    copy.dst_device = to[v].location.id();
                    copy.src = static_cast<const std::byte *>(from[v].data) + offset(r.source, source, y, z) * bytes;
                    copy.src_device = from[v].location.id();
                    copy.bytes = static_cast<std::uint64_t>(pieces.length * bytes);
                    transfers.push_back(copy);
                }
            }
        }
    }
}

/// Whether the CPU reaches the memory of all devices: the host backend, which names itself in its description.
[[nodiscard]] inline bool on_host_backend(const context &ctx) {
    const std::string text = ctx.describe();
    return text.substr(0, text.find('\n')).find(", host backend") != std::string::npos;
}

[[nodiscard]] inline copier cpu_copier() {
    return [](const context &ctx, device, span<const piece> pieces, direction way) -> launch {
        // Shared with what is enqueued, which may outlive the plan.
        const auto kept = std::make_shared<const std::vector<piece>>(pieces.begin(), pieces.end());
        return [context = ctx.get(), kept, way](stream_view stream) {
            check(mpgpu::detail::launch_host(context, stream.get(), [kept, way] { copy_on_cpu(*kept, way); }));
        };
    };
}

/// A signal whose value goes up with the exchanges: in exchange n it is n - `lag`.
struct counter {
    std::uint64_t *address;
    std::uint64_t lag;
};

/// Makes plans that span processes; defined below where <mpgpu/mpi.hpp> has been included.
struct processes;

} // namespace detail

// ---- the plan ------------------------------------------------------------------------

/// A halo exchange: made once, run every time step.
///
/// It refers to the context and to the arrays, which must outlive its last exchange, and owns messages, streams and
/// events. Move-only. Not for use by several threads at once. Exchanges of one plan happen one after the other, in
/// whatever streams they are asked for.
class plan {
  public:
    /// All ranks of the grid in this process, `arrays[rank]` on the device of each; several ranks may share a device.
    /// Throws `invalid_argument` for a grid or arrays that do not go together, `not_supported` when cells must be
    /// packed on the CUDA backend and there is no `copier`, and what `mpgpu::plan` throws.
    plan(const context &ctx, const grid &g, span<const rank_arrays> arrays, const options &how = {})
        : plan(ctx, checked(g, arrays)) {
        const detail::schedule all = detail::schedule_of(g, detail::element_sizes(arrays[0]), how.direct_pieces);
        std::vector<peer> peers;
        for (int rank = 0; rank < rank_count(g); ++rank) {
            const rank_arrays &own = arrays[static_cast<std::size_t>(rank)];
            add_lane(ctx, all, rank, own[0].location);
            peers.push_back({own, lanes_.back().inbox});
        }
        build(ctx, g, all, peers, how);
    }

    plan(plan &&) noexcept = default;
    plan &operator=(plan &&) noexcept = default;
    plan(const plan &) = delete;
    plan &operator=(const plan &) = delete;
    /// Waits until everything enqueued so far has finished, because it frees the messages. A plan of `make_plan` is
    /// given to `close` before.
    ~plan() = default;

    /// Enqueues an exchange: after all earlier work in `stream`, before all later work in it. Never blocks. Throws
    /// `invalid_argument`, `peer_gone`, `driver_error`.
    void exchange(stream_view stream) {
        start(stream);
        finish(stream);
    }

    /// Enqueues an exchange after all earlier work in `stream`, which later work in `stream` does not wait for. Until
    /// `finish`, that work may use all cells but these: it may only read the computed cells that are a ghost width or
    /// less from the edge of the array's computed cells, and must not touch ghost cells. Never blocks. Throws as
    /// `exchange` does.
    void start(stream_view stream) {
        ++exchanges_;
        const mpgpu::stream &order = lanes_.front().order;
        begun_.record(stream);
        order.wait(begun_);
        raise(ghosts_free_);
        if (packs_) {
            fork([](const lane &l) -> const launch & { return l.pack; });
        }
        wait(room_);
        if (transfers_) {
            transfers_->enqueue(order);
        }
        raise(sent_);
        wait(arrived_);
        if (packs_) {
            fork([](const lane &l) -> const launch & { return l.unpack; });
        }
        raise(taken_);
        finished_.record(order);
    }

    /// Work enqueued in `stream` from now on starts after the last exchange that was started, on this process's ranks.
    /// May be called for several streams. Never blocks. Throws `invalid_argument`, `driver_error`.
    void finish(stream_view stream) { detail::check(mp_stream_wait_event(context_, stream.get(), finished_.get())); }

    /// Blocks until all exchanges that were started have finished. Throws `peer_gone`, once, when a rank of another
    /// process has ended, so that ghost cells since the last call may not have been written; `driver_error`.
    void synchronize() const {
        for (const lane &l : lanes_) {
            l.order.synchronize();
        }
    }

    /// Bytes that this process's ranks send in one exchange, to themselves included: straight into ghost cells.
    [[nodiscard]] std::uint64_t direct_bytes() const noexcept { return direct_bytes_; }
    /// The same: packed.
    [[nodiscard]] std::uint64_t packed_bytes() const noexcept { return packed_bytes_; }

    /// The plan of the transfers, for `describe` and `info`; `nullptr` where nothing is transferred.
    [[nodiscard]] const mpgpu::plan *transfers() const noexcept { return transfers_ ? &*transfers_ : nullptr; }

  private:
    friend struct detail::processes;

    /// A rank of this process.
    struct lane {
        int rank;
        stream order; ///< its packs and unpacks; that of the first lane also orders everything else
        event done;
        memory outbox;
        memory inbox;
        launch pack;
        launch unpack;
    };

    /// Where a rank's ghost cells and messages are written. Ranks that this process does not send to have none.
    struct peer {
        rank_arrays arrays;
        device_span<std::byte> inbox;
    };

    /// That the arguments have been looked at, before anything is made.
    struct valid {};

    plan(const context &ctx, valid) : context_(ctx.get()), begun_(ctx), finished_(ctx) {}

    static valid checked(const grid &g, span<const rank_arrays> arrays) {
        std::optional<error_details> wrong = detail::wrong(g);
        if (!wrong && arrays.size() != static_cast<std::size_t>(rank_count(g))) {
            wrong = detail::invalid("arrays", "arrays of " + std::to_string(arrays.size()) + " ranks: the grid has " +
                                                  std::to_string(rank_count(g)));
        }
        for (int rank = 0; !wrong && rank < rank_count(g); ++rank) {
            const rank_arrays &own = arrays[static_cast<std::size_t>(rank)];
            wrong = detail::wrong(g, rank, own);
            if (!wrong && detail::element_sizes(own) != detail::element_sizes(arrays[0])) {
                wrong = detail::invalid("arrays", "rank " + std::to_string(rank) +
                                                      " has other variables than rank 0: number and element sizes "
                                                      "must be the same on all ranks, in the same order");
            }
        }
        if (wrong) {
            detail::fail(std::move(*wrong));
        }
        return {};
    }

    void add_lane(const context &ctx, const detail::schedule &all, int rank, device where) {
        const auto index = static_cast<std::size_t>(rank);
        lanes_.push_back({rank, stream(ctx, where), event(ctx), memory(ctx, where, all.outbox_bytes[index]),
                          memory(ctx, where, all.inbox_bytes[index]), launch(), launch()});
    }

    /// `peers` by rank: those that this process's ranks send to, and all of its own.
    void build(const context &ctx, const grid &g, const detail::schedule &all, std::vector<peer> &peers,
               const options &how) {
        const copier copy = how.copy ? how.copy : detail::on_host_backend(ctx) ? detail::cpu_copier() : copier();
        std::vector<transfer> transfers;
        for (lane &l : lanes_) {
            std::vector<piece> pack;
            std::vector<piece> unpack;
            const rank_arrays &own = peers[static_cast<std::size_t>(l.rank)].arrays;
            for (const detail::pair &p : all.pairs) {
                peer &receiver = peers[static_cast<std::size_t>(p.to)];
                std::byte *sent = l.outbox.data() + p.outbox_offset;
                if (p.from == l.rank) {
                    detail::add_pieces(pack, p, g, own, sent, direction::pack);
                    detail::add_direct(transfers, p, g, own, receiver.arrays);
                    count(p, own);
                }
                if (p.to == l.rank) {
                    std::byte *got = p.from == p.to ? sent : l.inbox.data() + p.inbox_offset;
                    detail::add_pieces(unpack, p, g, own, got, direction::unpack);
                }
                if (p.from == l.rank && p.to != l.rank && p.bytes > 0) {
                    transfers.push_back(make_transfer(receiver.inbox.subspan(p.inbox_offset, p.bytes),
                                                      l.outbox.subspan(p.outbox_offset, p.bytes)));
                }
            }
            if ((!pack.empty() || !unpack.empty()) && !copy) {
                detail::fail(detail::refusal(MP_ERROR_NOT_SUPPORTED, "how",
                                             "rank " + std::to_string(l.rank) +
                                                 " has cells to pack, and on the CUDA backend that takes a "
                                                 "kernel: give options::copy one, or set options::direct_pieces "
                                                 "to the largest value to copy each row by itself"));
            }
            if (!pack.empty()) {
                l.pack = copy(ctx, own[0].location, pack, direction::pack);
            }
            if (!unpack.empty()) {
                l.unpack = copy(ctx, own[0].location, unpack, direction::unpack);
            }
            packs_ = packs_ || l.pack || l.unpack;
        }
        if (!transfers.empty()) {
            transfers_.emplace(ctx, transfers, how.transfers);
        }
    }

    void count(const detail::pair &p, const rank_arrays &own) noexcept {
        for (const array &one : own) {
            for (const detail::region &r : p.direct) {
                direct_bytes_ += detail::cells_of(r) * one.element_bytes;
            }
            for (const detail::region &r : p.packed) {
                packed_bytes_ += detail::cells_of(r) * one.element_bytes;
            }
        }
    }

    /// Lets every lane launch at the same time, between what came before and what follows in the first lane's stream.
    template <class Which> void fork(Which &&which) {
        lane &first = lanes_.front();
        first.done.record(first.order);
        for (lane &l : lanes_) {
            const launch &copies = which(l);
            if (&l == &first || !copies) {
                continue;
            }
            l.order.wait(first.done);
            copies(l.order);
            l.done.record(l.order);
        }
        if (which(first)) {
            which(first)(first.order);
        }
        for (lane &l : lanes_) {
            if (&l != &first && which(l)) {
                first.order.wait(l.done);
            }
        }
    }

    const std::vector<signal> &at_this_exchange(const std::vector<detail::counter> &counters) {
        signals_.clear();
        for (const detail::counter &c : counters) {
            signals_.push_back({c.address, exchanges_ - c.lag});
        }
        return signals_;
    }

    void raise(const std::vector<detail::counter> &counters) {
        if (!counters.empty()) {
            const std::vector<signal> &now = at_this_exchange(counters);
            detail::check(mp_stream_raise_signals(context_, lanes_.front().order.get(), now.data(), now.size()));
        }
    }

    void wait(const std::vector<detail::counter> &counters) {
        if (!counters.empty()) {
            const std::vector<signal> &now = at_this_exchange(counters);
            detail::check(mp_stream_wait_signals(context_, lanes_.front().order.get(), now.data(), now.size()));
        }
    }

    mp_context_t context_;
    std::shared_ptr<void> imports_; ///< mappings of other processes' memory
    event begun_;
    event finished_;
    std::vector<lane> lanes_;
    std::optional<mpgpu::plan> transfers_;
    bool packs_ = false;
    std::uint64_t exchanges_ = 0; ///< started so far
    std::uint64_t direct_bytes_ = 0;
    std::uint64_t packed_bytes_ = 0;

    // Between processes, in the order of an exchange. In one process, streams order everything, and these are empty.
    std::vector<detail::counter> ghosts_free_; ///< raised: ranks that write here directly may
    std::vector<detail::counter> room_;        ///< waited for: where this rank writes may be written
    std::vector<detail::counter> sent_;        ///< raised: what this rank sends has arrived
    std::vector<detail::counter> arrived_;     ///< waited for: what others send here
    std::vector<detail::counter> taken_;       ///< raised: messages are unpacked and may be overwritten
    std::vector<signal> signals_;              ///< of one call, kept for its capacity
};

} // namespace mpgpu::halo

#endif // MPGPU_HALO_HPP

// ---- one process for each rank -------------------------------------------------------

#if defined(MPGPU_MPI_HPP) && !defined(MPGPU_HALO_MPI)
#define MPGPU_HALO_MPI

namespace mpgpu::halo {

namespace detail {

struct processes {
    /// What a plan maps of other ranks, and the counters that they raise here.
    struct imports {
        buffer<std::uint64_t> counters; ///< `[r]`: exchanges that r has sent here; `[ranks + r]`: r has taken or awaits
        mpi::shared_memory<std::uint64_t> all_counters;
        mpi::shared_memory<std::byte> inboxes;
        std::vector<mpi::shared_memory<std::byte>> variables; ///< only where something is written to directly

        void unmap() noexcept {
            all_counters = {};
            inboxes = {};
            variables.clear();
        }
    };

    static int rank_of(const mpi::node &node) {
        int index = 0;
        mpi::detail::check(MPI_Comm_rank(node.communicator(), &index), "MPI_Comm_rank");
        return node.ranks()[static_cast<std::size_t>(index)];
    }

    static void barrier(const mpi::node &node) { mpi::detail::check(MPI_Barrier(node.communicator()), "MPI_Barrier"); }

    /// Whether something holds on all ranks of the node.
    static bool everywhere(const mpi::node &node, bool here) {
        const int mine = here ? 1 : 0;
        int least = 0;
        mpi::detail::check(MPI_Allreduce(&mine, &least, 1, MPI_INT, MPI_MIN, node.communicator()), "MPI_Allreduce");
        return least != 0;
    }

    /// Calls `step()`. When it throws on one rank, all throw: a rank that went on alone would wait for ever.
    template <class Step> static void together(const mpi::node &node, const Step &step) {
#if MPGPU_EXCEPTIONS
        try {
            step();
        } catch (...) {
            static_cast<void>(everywhere(node, false));
            throw;
        }
#else
        step(); // ends the process, and with it the job, where it fails
#endif
        if (!everywhere(node, true)) {
            fail(invalid("arrays",
                         "another rank could not make its part of the halo exchange; its own message says why"));
        }
    }

    static void check_arguments(const mpi::node &node, const grid &g, int rank, const rank_arrays &arrays) {
        std::optional<error_details> found = wrong(g);
        if (!found && rank_count(g) != node.size()) {
            found = invalid("grid", "a rank grid of " + std::to_string(rank_count(g)) +
                                        " ranks: the communicator has " + std::to_string(node.size()));
        }
        if (!found && node.ranks().size() != static_cast<std::size_t>(node.size())) {
            found = refusal(MP_ERROR_NOT_SUPPORTED, "node",
                            std::to_string(node.size()) + " ranks, of which " + std::to_string(node.ranks().size()) +
                                " are on this node: all must be; exchange with ranks of other nodes through MPI");
        }
        found = found ? found : wrong(g, rank, arrays);
        if (found) {
            fail(std::move(*found));
        }
    }

    /// That all ranks have passed the same: a schedule that differs would put bytes in the wrong place.
    static void check_agreement(const mpi::node &node, const grid &g, const rank_arrays &arrays, const options &how) {
        std::uint64_t print = 14695981039346656037U; // FNV-1a, a word at a time
        const auto add = [&print](auto word) { print = (print ^ static_cast<std::uint64_t>(word)) * 1099511628211U; };
        for (std::size_t d = 0; d < 3; ++d) {
            add(g.cells[d]);
            add(g.ranks[d]);
            add(g.periodic[d]);
            add(g.ghost[d]);
        }
        add(g.reach);
        add(how.direct_pieces);
        for (const array &one : arrays) {
            add(one.element_bytes);
        }
        const std::array<std::uint64_t, 2> mine = {print, ~print};
        std::array<std::uint64_t, 2> least{};
        mpi::detail::check(MPI_Allreduce(mine.data(), least.data(), 2, MPI_UINT64_T, MPI_MIN, node.communicator()),
                           "MPI_Allreduce");
        if (least[0] != ~least[1]) { // the least and the greatest print
            fail(invalid("grid", "the ranks have passed different grids, variables or values of direct_pieces"));
        }
    }

    /// The memory of a rank that must be there, `bytes` long.
    template <class T> static imported_memory<T> &mapped(mpi::shared_memory<T> &memory, int rank, std::uint64_t bytes) {
        imported_memory<T> *found = memory.of(rank);
        if (found == nullptr || found->size_bytes() < bytes) {
            const mp_status_t status =
                found == nullptr ? static_cast<mp_status_t>(memory.status(rank)) : MP_ERROR_INVALID_ARGUMENT;
            fail(refusal(status != MP_SUCCESS ? status : MP_ERROR_INTERNAL, "arrays",
                         "the memory of rank " + std::to_string(rank) + " cannot be written to: " + memory.why(rank)));
        }
        return *found;
    }

    /// Whether this rank can write to the arrays of every rank that it sends to directly.
    static bool map_variables(const mpi::node &node, const schedule &all, int rank, const rank_arrays &arrays,
                              imports &kept) {
        bool mapped = true;
        for (const array &one : arrays) {
            const auto bytes = static_cast<std::size_t>(one.size * one.element_bytes);
            kept.variables.push_back(node.exchange(
                device_span<std::byte>(span<std::byte>(static_cast<std::byte *>(one.data), bytes), one.location)));
            for (const pair &p : all.pairs) {
                mapped = mapped && (p.from != rank || p.direct.empty() || kept.variables.back().of(p.to) != nullptr);
            }
        }
        return everywhere(node, mapped);
    }

    static bool writes_directly(const schedule &all) noexcept {
        return std::any_of(all.pairs.begin(), all.pairs.end(),
                           [](const pair &p) { return p.from != p.to && !p.direct.empty(); });
    }

    static plan make(const context &ctx, const mpi::node &node, const grid &g, const rank_arrays &arrays,
                     const options &how) {
        const int rank = rank_of(node);
        together(node, [&] { check_arguments(node, g, rank, arrays); });
        check_agreement(node, g, arrays, how);

        const auto kept = std::make_shared<imports>();
        schedule all = schedule_of(g, element_sizes(arrays), how.direct_pieces);
        if (writes_directly(all) && !map_variables(node, all, rank, arrays, *kept)) {
            kept->variables.clear();
            all = schedule_of(g, element_sizes(arrays), 0); // memory that cannot be shared: by messages, which can
        }

        const auto ranks = static_cast<std::size_t>(rank_count(g));
        std::optional<plan> made;
        together(node, [&] {
            made.emplace(plan(ctx, plan::valid{}));
            made->add_lane(ctx, all, rank, arrays[0].location);
            kept->counters = buffer<std::uint64_t>(ctx, device::host(), 2 * ranks);
            std::fill_n(kept->counters.data(), kept->counters.size(), 0);
        });
        kept->all_counters = node.exchange(kept->counters);
        kept->inboxes = node.exchange(made->lanes_[0].inbox);
        together(node, [&] {
            add_counters(all, rank, *kept, *made);
            std::vector<plan::peer> peers = peers_of(g, all, rank, arrays, *kept, *made);
            made->imports_ = kept;
            made->build(ctx, g, all, peers, how);
        });
        return std::move(*made);
    }

    /// A pair has one counter at the receiver, raised by the sender to n when the bytes of exchange n are there, and
    /// one at the sender, raised by the receiver. Where ghost cells are written to directly, the sender waits until the
    /// receiver has started exchange n: only then has it done with the ghost cells of the last one. Where there are
    /// only messages, it waits until the one of exchange n - 1 has been unpacked.
    static void add_counters(const schedule &all, int rank, imports &kept, plan &made) {
        const auto ranks = kept.counters.size() / 2;
        const auto there = [&](int peer) { return mapped(kept.all_counters, peer, kept.counters.size_bytes()).data(); };
        for (const pair &p : all.pairs) {
            const auto from = static_cast<std::size_t>(p.from);
            const auto to = static_cast<std::size_t>(p.to);
            if (p.from == p.to) {
                continue;
            }
            if (p.from == rank) {
                made.room_.push_back({kept.counters.data() + ranks + to, p.direct.empty() ? 1U : 0U});
                made.sent_.push_back({there(p.to) + from, 0});
            }
            if (p.to == rank) {
                made.arrived_.push_back({kept.counters.data() + from, 0});
                (p.direct.empty() ? made.taken_ : made.ghosts_free_).push_back({there(p.from) + ranks + to, 0});
            }
        }
    }

    static std::vector<plan::peer> peers_of(const grid &g, const schedule &all, int rank, const rank_arrays &arrays,
                                            imports &kept, plan &made) {
        const auto ranks = static_cast<std::size_t>(rank_count(g));
        std::vector<plan::peer> peers(ranks, {{}, {{}, device::host()}});
        peers[static_cast<std::size_t>(rank)] = {arrays, made.lanes_[0].inbox};
        for (const pair &p : all.pairs) {
            if (p.from != rank || p.to == rank) {
                continue;
            }
            const auto to = static_cast<std::size_t>(p.to);
            if (p.bytes > 0) {
                peers[to].inbox = mapped(kept.inboxes, p.to, all.inbox_bytes[to]);
            }
            if (!p.direct.empty()) {
                const std::array<std::int64_t, 3> e = extents(g, p.to);
                const auto elements = static_cast<std::size_t>(e[0] * e[1] * e[2]);
                for (std::size_t v = 0; v < arrays.size(); ++v) {
                    const std::size_t bytes = arrays[v].element_bytes;
                    imported_memory<std::byte> &memory = mapped(kept.variables[v], p.to, elements * bytes);
                    peers[to].arrays.push_back({memory.data(), memory.location(), bytes, elements});
                }
            }
        }
        return peers;
    }

    static void close(const mpi::node &node, plan &whole) {
        mpgpu::detail::check(mp_stream_synchronize(whole.context_, whole.lanes_.front().order.get()));
        barrier(node); // nobody writes to anybody any more
        whole.transfers_.reset();
        static_cast<imports *>(whole.imports_.get())->unmap();
        barrier(node); // nobody has anybody's memory mapped any more
    }
};

} // namespace detail

/// One process for each rank, which gives the arrays of its own; all ranks of `node`'s communicator are on this node,
/// and have the numbers there that they have in the grid. Collective over them. In the time loop, ranks are ordered by
/// their streams and by signals: no call into MPI, and no host waits.
///
/// Memory that cannot be mapped by its neighbours (see share.md) is exchanged by messages, `direct_pieces` or not. When
/// a rank cannot make its part, all throw: `invalid_argument` for arguments that do not go together or are not the same
/// on all ranks, `not_supported` for ranks on other nodes and as the constructor does, and what mpi.hpp throws. When a
/// rank ends in the middle of an exchange, the streams of its neighbours go on, `plan::synchronize` says `peer_gone`,
/// and so does a later `start`. The caller's streams do not say it by themselves.
[[nodiscard]] inline plan make_plan(const context &ctx, const mpi::node &node, const grid &g, const rank_arrays &arrays,
                                    const options &how = {}) {
    return detail::processes::make(ctx, node, g, arrays, how);
}

/// Ends a plan of `make_plan`: waits for its exchanges on all ranks, and frees no memory that another rank has mapped.
/// Collective; call it before the arrays are freed and before MPI_Finalize.
inline void close(const mpi::node &node, plan whole) {
    detail::processes::close(node, whole);
}

} // namespace mpgpu::halo

#endif // MPGPU_HALO_MPI
