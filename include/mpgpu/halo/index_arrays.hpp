// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_INDEX_ARRAYS_HPP
#define MPGPU_HALO_INDEX_ARRAYS_HPP

/// @file
/// Arrays and arguments of the kernel of exchanges by index lists, in host memory, and its execution by CPU threads.
/// Part of mpgpu/halo_indexed.hpp; include that header.

#include <mpgpu/halo/index_kernel.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

/// Arrays to which an `index_work` (kernel argument) refers, in host memory. The addresses of the messages are set by
/// the caller.
struct index_arrays {
    /// Creates the arrays. `neighbours` are valid, and sorted by rank. `first` is the index of the first entry of a
    /// vector in the lists of the neighbours. In the arrays, the first entry has index 0.
    index_arrays(array_view<const index_neighbour> neighbours, std::size_t entries, std::size_t bytes,
                 std::int64_t first = 0)
        : messages(neighbours.size()), entry_bytes(bytes), first_index_(first) {
        const bool is_wide = entries > std::size_t{1} + std::numeric_limits<std::uint32_t>::max();
        for (std::size_t m = 0; m < neighbours.size(); ++m) {
            messages[m].send = add(neighbours[m].send, is_wide);
            messages[m].receive = add(neighbours[m].receive, is_wide);
            sends.push_back(sends.back() + neighbours[m].send.size());
            receives.push_back(receives.back() + neighbours[m].receive.size());
        }
        add_targets(neighbours);
        overlaps = std::any_of(neighbours.begin(), neighbours.end(), [this](const index_neighbour &n) {
            for (std::size_t i = 0; i < n.receive.size(); ++i) {
                const auto entry = entry_of(n.receive, i);
                const auto found = std::lower_bound(
                    targets.begin(), targets.end() - 1, entry,
                    [](const index_target &target, std::uint64_t wanted) { return target.entry < wanted; });
                if (found != targets.end() - 1 && found->entry == entry) {
                    return true;
                }
            }
            return false;
        });
    }

    /// Returns the kernel argument without the addresses of arrays.
    [[nodiscard]] index_work values() const noexcept {
        index_work work;
        work.gone = gone;
        work.target_count = targets.size() - 1;
        work.count = static_cast<std::uint32_t>(messages.size());
        work.overlaps = overlaps;
        return work;
    }

    /// Returns the number of bytes that a rank sends or receives in the largest exchange, whichever is greater.
    [[nodiscard]] std::uint64_t most_bytes() const noexcept {
        return std::max(sends.back(), receives.back()) * entry_bytes;
    }

    std::vector<index_message> messages;
    std::vector<std::uint64_t> sends = {0};    ///< first sent entry of each message, see `index_work::sends`
    std::vector<std::uint64_t> receives = {0}; ///< first received entry of each message, see `index_work::receives`
    std::vector<std::uint32_t> narrow;         ///< all index lists, if the indices have at most 32 bits
    std::vector<std::uint64_t> wide;           ///< all index lists, if the indices have more than 32 bits
    std::vector<index_target> targets;         ///< entries of the send lists, see `index_work::targets`
    std::vector<index_term> terms;
    std::uint64_t entry_bytes;           ///< largest sum of the entry sizes of all fields, see `index_options`
    const std::uint64_t *gone = nullptr; ///< word that is not 0 if no more messages will arrive, see `index_work::gone`
    bool overlaps = false;               ///< true if a send list and a receive list contain the same entry

  private:
    /// Returns the index that a list contains at a position, converted such that the first entry has index 0.
    [[nodiscard]] std::uint64_t entry_of(const index_list &list, std::size_t position) const noexcept {
        return static_cast<std::uint64_t>(list[position] - first_index_);
    }

    /// Appends an index list to the array of all lists.
    [[nodiscard]] index_part add(const index_list &list, bool is_wide) {
        if (list.is_range()) {
            return {no_list, list.empty() ? 0 : entry_of(list, 0)};
        }
        const index_part made{narrow.size() + wide.size(), 0};
        for (std::size_t i = 0; i < list.size(); ++i) {
            if (is_wide) {
                wide.push_back(entry_of(list, i));
            } else {
                narrow.push_back(static_cast<std::uint32_t>(entry_of(list, i)));
            }
        }
        return made;
    }

    /// Sets the targets and contributions of `index_operation::reverse_add`.
    void add_targets(array_view<const index_neighbour> neighbours) {
        struct contribution {
            std::uint64_t entry;
            index_term term;
        };
        std::vector<contribution> all;
        for (std::size_t m = 0; m < neighbours.size(); ++m) {
            for (std::size_t i = 0; i < neighbours[m].send.size(); ++i) {
                all.push_back(
                    {entry_of(neighbours[m].send, i), {static_cast<std::uint32_t>(m), static_cast<std::uint32_t>(i)}});
            }
        }
        std::sort(all.begin(), all.end(), [](const contribution &a, const contribution &b) {
            return std::tie(a.entry, a.term.message, a.term.position) <
                   std::tie(b.entry, b.term.message, b.term.position);
        });
        for (const contribution &c : all) {
            if (targets.empty() || targets.back().entry != c.entry) {
                targets.push_back({c.entry, terms.size()});
            }
            terms.push_back(c.term);
        }
        targets.push_back({0, terms.size()});
    }

    std::int64_t first_index_; ///< index of the first entry of a vector in the lists of the neighbours
};

/// Returns a field divided into words of the largest size to which all its entries are aligned. If the exchange adds,
/// the words are the numbers of the field.
[[nodiscard]] inline index_words words_of(const index_field &f, bool adds) noexcept {
    const std::uint64_t all = reinterpret_cast<std::uintptr_t>(f.data) | f.entry_bytes | f.stride_bytes;
    std::uint32_t bytes = 1;
    for (const std::uint32_t size : {4U, 8U, 16U}) {
        bytes = all % size == 0 ? size : bytes;
    }
    if (adds) {
        bytes = f.values == number::f64 ? sizeof(double) : sizeof(float);
    }
    return {static_cast<std::byte *>(f.data), f.stride_bytes, f.entry_bytes, f.entry_bytes / bytes, bytes, f.values};
}

/// Returns the arguments of a launch that performs a whole exchange.
[[nodiscard]] inline index_call call_of(array_view<const index_field> fields, index_operation operation) noexcept {
    index_call call;
    for (const index_field &f : fields) {
        call.fields[call.count++] = words_of(f, operation != index_operation::copy);
    }
    call.operation = operation;
    return call;
}

/// Returns a function that performs the work of the kernel on CPU threads, each of which acts as a block. The CPU must
/// be able to access the fields and messages.
[[nodiscard]] inline index_kernel cpu_indexed() {
    struct kernel {
        explicit kernel(index_arrays lists) : arrays(std::move(lists)), work(arrays.values()) {
            constexpr std::uint64_t worth_a_thread = 32768; // bytes whose copy takes as long as starting a thread
            blocks = arrays.most_bytes() < worth_a_thread ? 1 : 2;
            work.messages = arrays.messages.data();
            work.sends = arrays.sends.data();
            work.receives = arrays.receives.data();
            work.narrow = arrays.wide.empty() ? arrays.narrow.data() : nullptr;
            work.wide = arrays.wide.data();
            work.targets = arrays.targets.data();
            work.terms = arrays.terms.data();
            work.state = &state;
        }
        kernel(const kernel &) = delete;
        kernel(kernel &&) = delete;
        kernel &operator=(const kernel &) = delete;
        kernel &operator=(kernel &&) = delete;
        ~kernel() = default;

        index_arrays arrays;
        index_state state{};
        index_work work;
        std::uint32_t blocks = 1;
    };
    return [](const context &ctx, device, const index_arrays &arrays, int) -> index_launch {
        // Shared ownership, because enqueued work may outlive the `indexed` object.
        const auto kept = std::make_shared<kernel>(arrays);
        return [context = ctx.get(), kept](stream_view stream, const index_call &call) {
            index_work work = kept->work;
            work.call = call;
            check(mpgpu::detail::launch_host(context, stream.get(), [kept, work] {
                run_blocks(kept->blocks, [&work](const notify_block &block) { exchange_indexed(block, work); });
            }));
        };
    };
}

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_INDEX_ARRAYS_HPP
