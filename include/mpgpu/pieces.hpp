// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_PIECES_HPP
#define MPGPU_PIECES_HPP

/// @file
/// Copies of many small pieces without a plan: pages of a key-value cache, rows of a table.

#include <mpgpu/context.hpp>
#include <mpgpu/request.hpp>
#include <mpgpu/span.hpp>
#include <mpgpu/stream_view.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

namespace mpgpu {

/// One piece of `copy_pieces`. The C struct.
using piece = mp_segment_t;

/// Bounds of a copy of pieces. A field left alone is decided by the environment.
struct piece_options {
    /// Multiprocessors that the kernel may occupy at most; 0: `MPGPU_KERNEL_BLOCKS`.
    std::uint32_t multiprocessors = 0;
    /// Whether writes to host memory stay below the share of the link that `MPGPU_HOST_WRITE_PERCENT` names. Left
    /// alone, they do.
    std::optional<bool> paced;
};

/// Indices of blocks in host memory, or in memory of a GPU. An empty list stands for blocks 0, 1, 2 and so on.
class block_indices {
  public:
    /// Blocks in order.
    constexpr block_indices() noexcept = default;
    /// Indices of 32 bits.
    constexpr block_indices(array_view<const std::uint32_t> list) noexcept
        : data_(list.data()), size_(list.size()), width_(4) {}
    /// Indices of 64 bits.
    constexpr block_indices(array_view<const std::uint64_t> list) noexcept
        : data_(list.data()), size_(list.size()), width_(8) {}

    /// The first index; null for blocks in order.
    [[nodiscard]] constexpr const void *data() const noexcept { return data_; }
    /// Number of indices.
    [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
    /// Bytes of an index; 0 for blocks in order.
    [[nodiscard]] constexpr std::uint32_t width() const noexcept { return width_; }

  private:
    const void *data_ = nullptr;
    std::size_t size_ = 0;
    std::uint32_t width_ = 0;
};

/// Arrays of blocks at one end of a copy, one for each layer, all of one shape.
template <class T> struct block_arrays {
    /// First elements of the arrays.
    std::vector<T *> arrays;
    /// Blocks of each array.
    std::size_t blocks = 0;
    /// Elements from one block to the next; 0 for the elements of a block.
    std::size_t stride = 0;
};

namespace detail {

/// Access to the handle of a request for functions that make requests.
struct request_access {
    /// The place of the handle.
    [[nodiscard]] static mp_request_t *address(request &of) noexcept { return of.handle_.address(); }
};

/// The C struct of a copy's bounds.
[[nodiscard]] inline mp_piece_options_t c_options(const piece_options &options) noexcept {
    mp_piece_options_t c = MP_PIECE_OPTIONS_INIT;
    c.multiprocessors = options.multiprocessors;
    c.paced = options.paced ? (*options.paced ? MP_ON : MP_OFF) : MP_DEFAULT;
    return c;
}

/// Calls `mp_copy_blocks` with the C form of its arguments.
template <class T>
mp_status_t copy_blocks(const context &ctx, const block_arrays<T> &dst, block_indices dst_index,
                        const block_arrays<const T> &src, block_indices src_index, std::size_t count,
                        std::size_t elements, stream_view stream, const piece_options &options, mp_request_t *request) {
    static_assert(std::is_trivially_copyable_v<T>, "mpgpu: a copy moves bytes, so the elements must allow that");
    const std::vector<void *> to(dst.arrays.begin(), dst.arrays.end());
    const std::vector<const void *> from(src.arrays.begin(), src.arrays.end());
    mp_blocks_t blocks = MP_BLOCKS_INIT;
    blocks.dst = to.data();
    blocks.src = from.data();
    blocks.layers = to.size();
    blocks.block_bytes = elements * sizeof(T);
    blocks.count = count;
    blocks.dst_stride = dst.stride * sizeof(T);
    blocks.src_stride = src.stride * sizeof(T);
    blocks.dst_blocks = dst.blocks;
    blocks.src_blocks = src.blocks;
    blocks.dst_index = dst_index.data();
    blocks.src_index = src_index.data();
    blocks.index_bytes = dst_index.width() != 0 ? dst_index.width() : src_index.width() != 0 ? src_index.width() : 8;
    const mp_piece_options_t c = c_options(options);
    return mp_copy_blocks(ctx.get(), &blocks, &c, stream.get(), request);
}

/// Why the arguments of a block copy do not fit together; null if they do.
template <class T>
[[nodiscard]] const char *misfit(const block_arrays<T> &dst, block_indices dst_index, const block_arrays<const T> &src,
                                 block_indices src_index, std::size_t count) noexcept {
    const auto fits = [count](block_indices index) { return index.width() == 0 || index.size() >= count; };
    if (dst.arrays.size() != src.arrays.size()) {
        return "dst and src have different numbers of arrays: give one of each for every layer";
    }
    if (!fits(dst_index) || !fits(src_index)) {
        return "an index list is shorter than count: list as many blocks as are copied";
    }
    if (dst_index.width() != 0 && src_index.width() != 0 && dst_index.width() != src_index.width()) {
        return "one index list has 32 bits and the other 64: give both the same type";
    }
    return nullptr;
}

} // namespace detail

/// Copies `count` blocks of `elements` elements in `stream` by one kernel, without a plan: block `dst_index[i]` of each
/// destination array receives block `src_index[i]` of the source array of its layer. Does not block. Index lists in
/// host memory are read before it returns, those in memory of a GPU when the copy runs. `mp_copy_blocks` says more.
/// Throws `argument_error`, `not_supported`, `out_of_memory`, `driver_error`.
template <class T>
request copy_blocks(const context &ctx, const block_arrays<T> &dst, block_indices dst_index,
                    const block_arrays<const T> &src, block_indices src_index, std::size_t count, std::size_t elements,
                    stream_view stream, const piece_options &options = {}, on_error failed = {}) {
    request done;
    if (const char *why = detail::misfit(dst, dst_index, src, src_index, count)) {
        failed.report({status::invalid_argument, 0, "blocks", why});
        return done;
    }
    failed.report(detail::copy_blocks(ctx, dst, dst_index, src, src_index, count, elements, stream, options,
                                      detail::request_access::address(done)));
    return done;
}

/// `copy_blocks` for code that is ordered by streams alone: makes no request. Throws as `copy_blocks` does.
template <class T>
void enqueue_blocks(const context &ctx, const block_arrays<T> &dst, block_indices dst_index,
                    const block_arrays<const T> &src, block_indices src_index, std::size_t count, std::size_t elements,
                    stream_view stream, const piece_options &options = {}, on_error failed = {}) {
    if (const char *why = detail::misfit(dst, dst_index, src, src_index, count)) {
        failed.report({status::invalid_argument, 0, "blocks", why});
        return;
    }
    failed.report(detail::copy_blocks(ctx, dst, dst_index, src, src_index, count, elements, stream, options, nullptr));
}

/// Copies pieces in `stream` by one kernel, without a plan and in no order. The list is read before it returns. Does
/// not block. `mp_copy_pieces` says more. Throws as `copy_blocks` does.
inline request copy_pieces(const context &ctx, array_view<const piece> pieces, stream_view stream,
                           const piece_options &options = {}, on_error failed = {}) {
    request done;
    const mp_piece_options_t c = detail::c_options(options);
    failed.report(mp_copy_pieces(ctx.get(), pieces.data(), pieces.size(), &c, stream.get(),
                                 detail::request_access::address(done)));
    return done;
}

} // namespace mpgpu

#endif // MPGPU_PIECES_HPP
