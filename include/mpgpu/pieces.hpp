// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_PIECES_HPP
#define MPGPU_PIECES_HPP

/// @file
/// Copies of many small pieces without a plan, for example of pages of a key-value cache or rows of a table.

#include <mpgpu/context.hpp>
#include <mpgpu/request.hpp>
#include <mpgpu/span.hpp>
#include <mpgpu/stream_view.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace mpgpu {

/// Piece of `copy_pieces`: destination, source and size in bytes. An alias of the C struct.
using piece = mp_segment_t;

/// Options of a copy of pieces.
struct piece_options {
    /// Maximum number of multiprocessors that the kernel occupies. 0 selects the value of `MPGPU_KERNEL_BLOCKS`, which
    /// is 4 by default.
    std::uint32_t multiprocessors = 0;
    /// True (the default) if writes to host memory are paced: each group of threads of the kernel waits until its
    /// stores have arrived in host memory before it stores more. Without pacing, writes saturate the link and slow down
    /// other work of the GPU.
    std::optional<bool> paced;
    /// Bit mask of the GPUs whose PCIe links may carry a part of a copy between host memory and another GPU. Bit `g`
    /// represents GPU `g`. `MP_RELAY_NONE` allows no GPU. 0 allows those of `MPGPU_RELAY_GPUS`, or, if it is not set,
    /// all GPUs whose context the process has created.
    std::uint64_t relay_gpus = 0;
};

/// Index list of a block copy, in host memory or in memory of a GPU. A non-owning view. A default-constructed list
/// selects blocks 0 to `count` - 1.
class block_indices {
  public:
    /// Selects blocks 0 to `count` - 1.
    constexpr block_indices() noexcept = default;
    /// Constructs a view of a container or span of 32-bit or 64-bit integers, for example a `std::vector`.
    template <class C, class T = std::remove_pointer_t<decltype(std::declval<const C &>().data())>,
              std::enable_if_t<std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), int> = 0>
    constexpr block_indices(const C &list) noexcept
        : data_(list.data()), size_(list.size()), width_(static_cast<std::uint32_t>(sizeof(T))) {}

    /// Returns the address of the first index. Null for a default-constructed list.
    [[nodiscard]] constexpr const void *data() const noexcept { return data_; }
    /// Returns the number of indices.
    [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
    /// Returns the size of an index, bytes. 0 for a default-constructed list.
    [[nodiscard]] constexpr std::uint32_t width() const noexcept { return width_; }

  private:
    const void *data_ = nullptr;
    std::size_t size_ = 0;
    std::uint32_t width_ = 0;
};

/// Source or destination arrays of a block copy, one for each layer. All arrays have the same number of blocks and the
/// same stride.
template <class T> struct block_arrays {
    /// Addresses of the arrays.
    std::vector<T *> arrays;
    /// Number of blocks of each array.
    std::size_t blocks = 0;
    /// Distance between the starts of two consecutive blocks, in elements. 0 selects the number of elements of a block.
    std::size_t stride = 0;
};

namespace detail {

/// Access to a request's handle, for functions that create requests.
struct request_access {
    /// Returns the address of the handle of `of`.
    [[nodiscard]] static mp_request_t *address(request &of) noexcept { return of.handle_.address(); }
};

/// Converts the options to the struct of the C API.
[[nodiscard]] inline mp_piece_options_t c_options(const piece_options &options) noexcept {
    mp_piece_options_t c = MP_PIECE_OPTIONS_INIT;
    c.multiprocessors = options.multiprocessors;
    c.paced = options.paced ? (*options.paced ? MP_ON : MP_OFF) : MP_DEFAULT;
    c.relay_gpus = options.relay_gpus;
    return c;
}

/// Converts the arguments to the struct of the C API and calls `mp_copy_blocks`.
template <class T>
mp_status_t copy_blocks(const context &ctx, const block_arrays<T> &dst, block_indices dst_index,
                        const block_arrays<const T> &src, block_indices src_index, std::size_t count,
                        std::size_t elements, stream_view stream, const piece_options &options, mp_request_t *request) {
    static_assert(std::is_trivially_copyable_v<T>, "mpgpu: the type of the elements must be trivially copyable");
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

/// Returns an error text if the arguments of a block copy do not match each other, and null otherwise.
template <class T>
[[nodiscard]] const char *misfit(const block_arrays<T> &dst, block_indices dst_index, const block_arrays<const T> &src,
                                 block_indices src_index, std::size_t count) noexcept {
    const auto fits = [count](block_indices index) { return index.width() == 0 || index.size() >= count; };
    if (dst.arrays.size() != src.arrays.size()) {
        return "dst and src have different numbers of arrays: pass one destination and one source array for each layer";
    }
    if (!fits(dst_index) || !fits(src_index)) {
        return "an index list is shorter than count: pass count indices, or reduce count";
    }
    if (dst_index.width() != 0 && src_index.width() != 0 && dst_index.width() != src_index.width()) {
        return "one index list has 32-bit and the other 64-bit indices: use the same type in both";
    }
    return nullptr;
}

} // namespace detail

/// Enqueues a copy of `count` blocks in `stream`, after all earlier work in `stream` and before all later work. Does
/// not wait for the copy. Returns a request for the end of the copy. A kernel copies the blocks, without a plan.
///
/// Each block has `elements` elements. Block `dst_index[i]` of each destination array receives block `src_index[i]` of
/// the source array of the same layer. Index lists in host memory are read during the call only. Index lists in memory
/// of a GPU are read when the copy runs; if such a list contains an index that is out of range, `request::synchronize`
/// and the next `stream::synchronize` throw `argument_error`. See `mp_copy_blocks`.
///
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

/// Enqueues a copy of blocks without creating a request, for programs that use only streams for ordering. The arguments
/// and the exceptions are those of `copy_blocks`.
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

/// Enqueues a copy of many small pieces in `stream`, after all earlier work in `stream` and before all later work. Does
/// not wait for the copy. Returns a request for the end of the copy. One kernel copies the pieces, without a plan and
/// in no particular order. No destination may overlap another destination or a source; overlaps are not checked.
/// `pieces` is read during the call only. See `mp_copy_pieces`. Throws the exceptions of `copy_blocks`.
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
