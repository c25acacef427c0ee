// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_INDEX_LISTS_HPP
#define MPGPU_HALO_INDEX_LISTS_HPP

/// @file
/// Index lists, fields and options of exchanges by index lists, and their checks. Part of mpgpu/halo_indexed.hpp;
/// include that header.

#include <mpgpu/halo/mesh.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace mpgpu::halo {

/// List of indices of entries of a vector, or a contiguous range of entries. The first entry has index 0, unless
/// `index_options::first_index` is 1.
///
/// Contains a copy of the indices, which may have any integer type of 32 or 64 bits.
class index_list {
    template <class T>
    static constexpr bool is_index =
        std::is_integral_v<T> && !std::is_same_v<std::remove_cv_t<T>, bool> && (sizeof(T) == 4 || sizeof(T) == 8);
    template <class C> using element_of = std::remove_pointer_t<decltype(std::declval<const C &>().data())>;

  public:
    /// Constructs an empty list.
    index_list() = default;
    /// Constructs a list from a container or a view of indices in memory that the CPU can access, for example a
    /// `std::vector`.
    template <class C, std::enable_if_t<is_index<element_of<C>>, int> = 0>
    index_list(const C &indices) : indices_(indices.data(), indices.data() + indices.size()), size_(indices_.size()) {}

    /// Returns the contiguous range of `count` entries that begins at index `first`.
    [[nodiscard]] static index_list range(std::int64_t first, std::size_t count) {
        index_list made;
        made.first_ = first;
        made.size_ = count;
        return made;
    }

    /// Returns the number of indices.
    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    /// Returns true if the list has no indices.
    [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
    /// Returns true if the list is a contiguous range, which has no array of indices.
    [[nodiscard]] bool is_range() const noexcept { return indices_.empty(); }
    /// Returns the index at position `position`, which must be less than `size()`. An unsigned index above the range of
    /// the result is returned as a negative number.
    [[nodiscard]] std::int64_t operator[](std::size_t position) const noexcept {
        return is_range() ? first_ + static_cast<std::int64_t>(position) : indices_[position];
    }

  private:
    std::vector<std::int64_t> indices_;
    std::size_t size_ = 0;
    std::int64_t first_ = 0; ///< first index of a contiguous range
};

/// Neighbour of a rank in an exchange by index lists, and the entries that the two ranks exchange. A neighbour may be
/// the rank itself. A list may be empty.
struct index_neighbour {
    int rank = 0; ///< number of the neighbour in the communicator from which the node was created
    /// Entries to send, in the order of the message. An entry may occur several times, in one or several send lists.
    index_list send;
    /// Entries that receive the neighbour's message. An entry may occur only once in all receive lists.
    index_list receive;
};

/// Type of the numbers in an entry. Only exchanges that add need it.
enum class number : std::int32_t {
    none, ///< not known; the entries are copied as bytes
    f32,  ///< `float`
    f64   ///< `double`
};

/// Vector whose entries an exchange sends and receives: a non-owning view of memory of the `indexed` object's device.
/// Entry `i` has `entry_bytes` bytes and begins at `data + i * stride_bytes`.
struct index_field {
    void *data;               ///< address of entry 0
    device location;          ///< device that owns the memory
    std::size_t entry_bytes;  ///< size of an entry in bytes
    std::size_t stride_bytes; ///< distance of adjacent entries in bytes, at least `entry_bytes`
    std::size_t size;         ///< number of entries
    number values;            ///< type of the numbers in an entry
};

/// Converts a `buffer` or a `device_span` to a field. An entry consists of `elements_per_entry` adjacent elements,
/// for example 3 for a velocity.
template <class Elements>
[[nodiscard]] index_field field_of(Elements &&elements, std::size_t elements_per_entry = 1) noexcept {
    const auto whole = mpgpu::detail::as_device_span(elements);
    using element = typename decltype(whole)::element_type;
    static_assert(!std::is_const_v<element>, "mpgpu: an exchange writes to its fields");
    constexpr number type = std::is_same_v<element, double>  ? number::f64
                            : std::is_same_v<element, float> ? number::f32
                                                             : number::none;
    const std::size_t bytes = elements_per_entry * sizeof(element);
    return {
        whole.data(), whole.location(), bytes, bytes, elements_per_entry == 0 ? 0 : whole.size() / elements_per_entry,
        type};
}

/// Operation of an exchange by index lists.
enum class index_operation : std::int32_t {
    copy,       ///< the entries of the send lists are copied to the entries of the receive lists
    add,        ///< the entries of the send lists are added to the entries of the receive lists
    reverse_add ///< the entries of the receive lists are sent back and added to the entries of the send lists
};

/// Largest number of fields in an exchange by index lists.
constexpr std::size_t most_fields = 8;

namespace detail {
struct index_arrays;
struct index_call;
} // namespace detail

/// Function that enqueues the kernel of one exchange, or of a part of it, in the given stream.
using index_launch = std::function<void(stream_view, const detail::index_call &)>;

/// Function that creates an `index_launch` for one device. Its arguments after the device are:
/// - the arrays of the kernel, which are in host memory and valid only during the call,
/// - the number of processes that share the device.
using index_kernel = std::function<index_launch(const context &, device, const detail::index_arrays &, int)>;

/// Options of an `indexed` object.
struct index_options {
    /// Largest number of bytes per entry in an exchange: the sum of `index_field::entry_bytes` over all fields that are
    /// exchanged together. At most 1 MiB. Equal on all ranks. It determines the size of the message buffers.
    std::size_t entry_bytes = sizeof(double);
    /// Function that creates the kernel, on CUDA `cuda_indexed()` of mpgpu/halo.cuh. If it is empty, CPU threads are
    /// used, which is possible only on the host backend.
    index_kernel kernel;
    /// Longest time from the end of `start` until all messages to and from other nodes have been transferred, for
    /// example `std::chrono::seconds(60)`. After this time, `finish` throws `timeout`. If this option is empty,
    /// `finish` waits without limit, even if a rank on another node has exited. Neighbours on this node are not
    /// affected. See `options::time_limit`.
    std::optional<std::chrono::nanoseconds> time_limit;
    /// Index of the first entry of a vector in the index lists: 0, or 1 for lists of Fortran programs. If it is 1,
    /// error texts also count indices and positions in lists from 1. May differ between ranks.
    std::int64_t first_index = 0;
};

namespace detail {

constexpr std::size_t most_entry_bytes = std::size_t{1} << 20U;

/// Checks an index list of the neighbour `rank`. Returns the error, or nothing if all indices are in range for a vector
/// of `entries` entries. `first` is the index of the first entry.
[[nodiscard]] inline std::optional<error_details> wrong_list(const index_list &list, const char *name, int rank,
                                                             std::size_t entries, std::int64_t first) {
    const std::string whose = std::string(name) + " list of neighbour " + std::to_string(rank);
    if (list.size() > std::numeric_limits<std::uint32_t>::max()) {
        return invalid("neighbours", whose + ": " + std::to_string(list.size()) +
                                         " entries: the maximum is 2^32 - 1; use several halo::indexed objects");
    }
    const auto out_of_range = [&](std::int64_t index, std::size_t position) {
        return invalid("neighbours",
                       whose + ": index " + std::to_string(index) + " at position " +
                           std::to_string(position + static_cast<std::size_t>(first)) +
                           (entries == 0 ? ": the vectors have 0"
                                         : ": must be " + std::to_string(first) + " to " +
                                               std::to_string(entries - 1 + static_cast<std::size_t>(first)) +
                                               ", because the vectors have " + std::to_string(entries)) +
                           " entries; correct the list, or pass the length of the vectors as `entries`");
    };
    const auto is_valid = [&](std::int64_t index) {
        return index >= first && static_cast<std::uint64_t>(index - first) < entries;
    };
    if (list.is_range() && !list.empty()) {
        // Number of entries from the beginning of the range to the end of the vector.
        const std::size_t most = is_valid(list[0]) ? entries - static_cast<std::uint64_t>(list[0] - first) : 0;
        if (list.size() > most) {
            return out_of_range(list[most], most);
        }
        return std::nullopt;
    }
    for (std::size_t i = 0; i < list.size(); ++i) {
        if (!is_valid(list[i])) {
            return out_of_range(list[i], i);
        }
    }
    return std::nullopt;
}

/// Checks that no entry is in two receive lists, or twice in one. Returns the error, or nothing.
[[nodiscard]] inline std::optional<error_details> wrong_overlap(array_view<const index_neighbour> neighbours) {
    std::vector<std::pair<std::int64_t, int>> received; // index, and rank that sends the entry
    for (const index_neighbour &n : neighbours) {
        for (std::size_t i = 0; i < n.receive.size(); ++i) {
            received.emplace_back(n.receive[i], n.rank);
        }
    }
    std::sort(received.begin(), received.end());
    const auto same = std::adjacent_find(received.begin(), received.end(),
                                         [](const auto &a, const auto &b) { return a.first == b.first; });
    if (same == received.end()) {
        return std::nullopt;
    }
    const std::string index = std::to_string(same->first);
    const int other = std::next(same)->second;
    return invalid("neighbours",
                   (same->second == other
                        ? "index " + index + " is twice in the receive list of neighbour " + std::to_string(other)
                        : "index " + index + " is in the receive lists of neighbours " + std::to_string(same->second) +
                              " and " + std::to_string(other)) +
                       ": an entry may be received at most once; keep only one of the occurrences");
}

/// Checks the neighbours of a rank. Returns the error, or nothing if they are valid. `first` is the index of the first
/// entry of a vector.
[[nodiscard]] inline std::optional<error_details> wrong(array_view<const index_neighbour> neighbours,
                                                        std::size_t entries, int ranks, std::int64_t first) {
    if (entries > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return invalid("entries", std::to_string(entries) + " entries: the maximum is 2^63 - 1");
    }
    std::vector<int> numbers;
    for (const index_neighbour &n : neighbours) {
        if (n.rank < 0 || n.rank >= ranks) {
            return invalid("neighbours", "neighbour " + std::to_string(n.rank) + ": the communicator has " +
                                             std::to_string(ranks) + " ranks, numbered from 0");
        }
        std::optional<error_details> found = wrong_list(n.send, "send", n.rank, entries, first);
        found = found ? found : wrong_list(n.receive, "receive", n.rank, entries, first);
        if (found) {
            return found;
        }
        numbers.push_back(n.rank);
    }
    std::sort(numbers.begin(), numbers.end());
    const auto same = std::adjacent_find(numbers.begin(), numbers.end());
    if (same != numbers.end()) {
        return invalid("neighbours", "neighbour " + std::to_string(*same) +
                                         " is given twice: merge its lists into one index_neighbour");
    }
    return wrong_overlap(neighbours);
}

/// Checks the options. Returns the error, or nothing if they are valid.
[[nodiscard]] inline std::optional<error_details> wrong(const index_options &how) {
    if (how.entry_bytes < 1 || how.entry_bytes > most_entry_bytes) {
        return invalid("how", "index_options::entry_bytes: " + std::to_string(how.entry_bytes) + ": must be 1 to " +
                                  std::to_string(most_entry_bytes));
    }
    if (how.time_limit && how.time_limit->count() <= 0) {
        return invalid("how", "index_options::time_limit: " + std::to_string(how.time_limit->count()) +
                                  " ns: must be more than 0");
    }
    if (how.first_index != 0 && how.first_index != 1) {
        return invalid("how", "index_options::first_index: " + std::to_string(how.first_index) + ": must be 0 or 1");
    }
    return std::nullopt;
}

/// Checks a field of an exchange. `where` is the device of the `indexed` object, and `entries` the length of its
/// vectors.
[[nodiscard]] inline std::optional<error_details> wrong(const index_field &f, device where, std::size_t entries,
                                                        bool adds) {
    if (f.entry_bytes == 0 || f.stride_bytes < f.entry_bytes) {
        return invalid("fields", "entries of " + std::to_string(f.entry_bytes) + " bytes at a distance of " +
                                     std::to_string(f.stride_bytes) +
                                     " bytes: entries must have 1 byte or more, and must not overlap");
    }
    if (f.size < entries || (f.data == nullptr && entries > 0)) {
        return invalid("fields", "a field of " + std::to_string(f.data == nullptr ? 0 : f.size) +
                                     " entries: the halo::indexed object was created for vectors of " +
                                     std::to_string(entries) + " entries; pass vectors of that length");
    }
    if (f.location != where) {
        return invalid("fields", "a field on device " + std::to_string(f.location.id()) +
                                     ": the halo::indexed object was created for device " + std::to_string(where.id()) +
                                     "; pass vectors on that device");
    }
    const std::size_t bytes = f.values == number::f64 ? sizeof(double) : sizeof(float);
    if (adds && f.values != number::f32 && f.values != number::f64) {
        return invalid("fields", "a field without a number type: only float and double can be added; use "
                                 "field_of with a vector of float or double, or set index_field::values");
    }
    if (adds && (reinterpret_cast<std::uintptr_t>(f.data) | f.entry_bytes | f.stride_bytes) % bytes != 0) {
        return invalid("fields", "an exchange that adds requires that the field's address, entry_bytes (" +
                                     std::to_string(f.entry_bytes) + ") and stride_bytes (" +
                                     std::to_string(f.stride_bytes) + ") are multiples of " + std::to_string(bytes) +
                                     " bytes");
    }
    return std::nullopt;
}

/// Checks the fields of an exchange. Returns the error, or nothing if they are valid.
[[nodiscard]] inline std::optional<error_details> wrong(array_view<const index_field> fields, device where,
                                                        std::size_t entries, std::size_t entry_bytes,
                                                        index_operation operation) {
    if (fields.empty() || fields.size() > most_fields) {
        return invalid("fields", std::to_string(fields.size()) + " fields: must be 1 to " +
                                     std::to_string(most_fields) + "; exchange more fields in several exchanges");
    }
    if (operation < index_operation::copy || operation > index_operation::reverse_add) {
        return invalid("operation", "operation " + std::to_string(static_cast<int>(operation)) +
                                        ": must be copy, add or reverse_add");
    }
    std::size_t sum = 0;
    for (const index_field &f : fields) {
        std::optional<error_details> found = wrong(f, where, entries, operation != index_operation::copy);
        if (found) {
            return found;
        }
        sum += std::min(f.entry_bytes, most_entry_bytes + 1); // cannot overflow
    }
    if (sum > entry_bytes) {
        return invalid("fields", "entries of " + std::to_string(sum) +
                                     " bytes in all fields together: the maximum of this halo::indexed object is " +
                                     std::to_string(entry_bytes) +
                                     "; create it with a larger index_options::entry_bytes");
    }
    return std::nullopt;
}

} // namespace detail

} // namespace mpgpu::halo

#endif // MPGPU_HALO_INDEX_LISTS_HPP
