// SPDX-License-Identifier: MIT OR Apache-2.0
#ifndef MPGPU_HALO_INDEX_KERNEL_HPP
#define MPGPU_HALO_INDEX_KERNEL_HPP

/// @file
/// Kernel of exchanges by index lists. The kernel gathers the entries of all send lists
/// directly into the inboxes (buffers of received messages) of the receiving ranks and sets their flags. It waits for
/// the flags of its own inbox and scatters the messages. Part of mpgpu/halo_indexed.hpp; include that header.
///
/// **Protocol.** The protocol is that of pushed messages (halo/pushed.hpp). The kernel counts the exchanges of its rank
/// in device memory. An inbox has room for two exchanges: exchange n uses half n % 2. To set a flag, the kernel writes
/// the number of the exchange to it. The message of exchange n has arrived when its flag is at least n.
///
/// **Proof that a half is free.** The proof of halo/pushed.hpp requires three properties:
/// - Each rank receives a message from every rank to which it sends one. Here, two ranks that exchange any entry send
///   to each other in every exchange. A message without entries consists of its flag only.
/// - In every exchange, the kernel of a rank waits for the flags of all its messages, also of those without entries.
///   Block m % (number of blocks) waits for message m. Blocks that scatter a part of message m wait for it too. The
///   kernel ends after all blocks have ended.
/// - The kernels of an exchange run after the kernels of the previous exchange on the same rank. `start` and `finish`
///   launch one kernel each: the first gathers, the second waits and scatters. Only the second one increments the
///   number of the exchange. The flags of exchange n are set after both kernels of exchange n - 1 have ended.
///
/// All three operations of `index_operation` use the same inboxes and flags, so they may follow each other in any
/// order. The buffer of a message has space for the longer of the pair's two lists.
///
/// **Entries that are sent and received.** If an entry is both in a send list and in a receive list
/// (`index_arrays::overlaps`), no block scatters before all blocks of this rank have gathered.
///
/// **Order of additions.** Several messages may contain a contribution to the same entry if the operation is
/// `reverse_add`. The kernel then waits for all messages. One thread adds all contributions to one number, ordered by
/// the sender's rank and then by the position in the message. The sum is therefore the same in every execution.
///
/// **Ranks on other nodes.** Messages to and from them are in host memory and have no flags. The kernel that gathers
/// has ended before MPI sends them, and the kernel that scatters is launched after MPI has received them. One buffer
/// per message suffices. MPI has sent the messages of an exchange before the next exchange gathers. MPI receives the
/// messages of an exchange only after the gathering kernel has ended, and that kernel runs after the scattering kernel
/// of the previous exchange.
///
/// **Message format.** A message contains its fields one after the other. Each field is aligned to 16 bytes and
/// contains the entries in the order of the index list, without gaps. The sender and the receiver may copy words of
/// different sizes.

#include <mpgpu/halo/arrivals.hpp>
#include <mpgpu/halo/index_lists.hpp>
#include <mpgpu/notify.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace mpgpu::halo::detail {

/// Integer type of 16 bytes through which entries of any type are copied.
struct __attribute__((may_alias, aligned(16))) word_of_16 {
    std::uint64_t bits[2]; // device code cannot index a std::array
};

/// Value of `index_part::list` for a contiguous range of entries.
constexpr std::uint64_t no_list = ~std::uint64_t{0};

/// Entries of this rank's vectors that one message is gathered from or scattered to: an index list or a contiguous
/// range.
struct index_part {
    std::uint64_t list = no_list; ///< offset of the index list in the array of all index lists
    std::uint64_t first = 0;      ///< first entry of a contiguous range
};

/// Addresses of the messages between this rank and one neighbour. If the neighbour is on the same node, each message is
/// in the inbox of its receiver. If it is on another node, both messages are in host memory of this rank, and
/// `there_half` and `here_half` are 0.
struct index_message {
    std::byte *there = nullptr;          ///< message to the neighbour, in the first half of the inbox
    std::byte *here = nullptr;           ///< message from the neighbour, in the first half of the inbox
    std::uint64_t there_half = 0;        ///< offset of the second half of the neighbour's inbox, bytes
    std::uint64_t here_half = 0;         ///< offset of the second half of this rank's inbox, bytes
    std::uint64_t *there_flag = nullptr; ///< flag that this rank sets; null if the neighbour is on another node
    std::uint64_t *here_flag = nullptr;  ///< flag that the neighbour sets; null if it is on another node
    index_part send;
    index_part receive;
};

/// Entry to which `index_operation::reverse_add` adds contributions.
struct index_target {
    std::uint64_t entry; ///< index of the entry
    std::uint64_t first; ///< offset of its first contribution in the array of contributions
};

/// Contribution to an entry: an entry of a received message.
struct index_term {
    std::uint32_t message;
    std::uint32_t position; ///< position of the entry in the message
};

/// State that the kernel keeps between exchanges, in device memory. All members are initially 0.
struct index_state {
    std::uint64_t exchange;  ///< number of the last exchange that has ended
    std::uint64_t gathered;  ///< number of the last exchange in which all blocks have gathered their entries
    std::uint64_t abandoned; ///< number of the exchange that was abandoned because a rank exited; 0 if none
    std::uint32_t packed;    ///< number of blocks that have gathered their part of the current exchange
    std::uint32_t ended;     ///< number of blocks that have ended in the current exchange
};

/// Field of an exchange, divided into words. An entry consists of `words` words of `word_bytes` bytes.
struct index_words {
    std::byte *data = nullptr;
    std::uint64_t stride_bytes = 0;
    std::uint64_t entry_bytes = 0;
    std::uint64_t words = 0;
    std::uint32_t word_bytes = 0; ///< 16, 8, 4 or 1; the size of a number if the exchange adds
    number values = number::none;
};

/// Arguments of one launch: the fields, the operation, and the parts of the exchange that the launch performs.
struct index_call {
    index_words fields[most_fields] = {}; ///< fields; a C array, because device code cannot index a std::array
    std::uint32_t count = 0;              ///< number of fields
    index_operation operation = index_operation::copy;
    bool gathers = true;  ///< true if the launch gathers and sends
    bool scatters = true; ///< true if the launch waits and scatters
};

/// Kernel argument that describes an exchange. A plain value. Its arrays are in memory that the kernel can access.
struct index_work {
    const index_message *messages = nullptr; ///< messages by ascending rank of the neighbour
    /// Number of the first entry of each message, if the sent entries of all messages are numbered consecutively. One
    /// more element gives the total.
    const std::uint64_t *sends = nullptr;
    /// Number of the first entry of each message, if the received entries of all messages are numbered consecutively.
    /// One more element gives the total.
    const std::uint64_t *receives = nullptr;
    const std::uint32_t *narrow = nullptr; ///< index lists of 32-bit indices; null if the indices have 64 bits
    const std::uint64_t *wide = nullptr;   ///< index lists of 64-bit indices
    const index_target *targets = nullptr; ///< entries of the send lists; one more element marks the end
    const index_term *terms = nullptr;
    index_state *state = nullptr;
    const std::uint64_t *gone = nullptr; ///< word in host memory that is not 0 if no more messages will arrive
    std::uint64_t target_count = 0;
    std::uint32_t count = 0; ///< number of messages in each direction
    bool overlaps = false;   ///< true if a send list and a receive list contain the same entry
    index_call call;
};

/// Range of words.
struct word_range {
    std::uint64_t first;
    std::uint64_t end;
};

/// Returns the words that a block copies if `count` words are divided evenly among all blocks.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline word_range share_of(std::uint64_t count, const notify_block &block) {
    return {quotient(count * block.index, block.blocks), quotient(count * (block.index + 1), block.blocks)};
}

/// Returns the intersection of `all` and a message that occupies the words [first, end). Both use one numbering of the
/// words of all messages. The result is relative to `first`.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline word_range part_of(word_range all, std::uint64_t first, std::uint64_t end) {
    const std::uint64_t from = all.first > first ? all.first : first;
    const std::uint64_t to = all.end < end ? all.end : end;
    return from < to ? word_range{from - first, to - first} : word_range{0, 0};
}

/// Returns the message that contains entry `entry`, where the entries of all messages are numbered consecutively.
/// `starts` has `count` + 1 elements, and `entry` is less than the last one.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline std::uint32_t message_of(const std::uint64_t *starts, std::uint32_t count,
                                                                std::uint64_t entry) {
    std::uint32_t first = 0;
    std::uint32_t end = count;
    while (first + 1 < end) {
        const std::uint32_t middle = first + (end - first) / 2;
        if (starts[middle] <= entry) {
            first = middle;
        } else {
            end = middle;
        }
    }
    return first;
}

/// Returns the index of the vector entry at position `position` of a message.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline std::uint64_t entry_of(const index_work &work, const index_part &part,
                                                              std::uint64_t position) {
    if (part.list == no_list) {
        return part.first + position;
    }
    return work.narrow != nullptr ? work.narrow[part.list + position] : work.wide[part.list + position];
}

/// Returns the offset in a message of `entries` entries at which field `f` begins, bytes.
[[nodiscard]] MPGPU_NOTIFY_BOTH inline std::uint64_t offset_of(const index_call &call, std::uint32_t f,
                                                               std::uint64_t entries) {
    constexpr std::uint64_t alignment = sizeof(word_of_16);
    std::uint64_t offset = 0;
    for (std::uint32_t g = 0; g < f; ++g) {
        offset += (entries * call.fields[g].entry_bytes + alignment - 1) / alignment * alignment;
    }
    return offset;
}

/// Position in a list of entries: the entry, and the word in the entry. `advance` moves the position by a fixed number
/// of words. Only the constructor divides, because division is slow on GPUs.
class word_walk {
  public:
    MPGPU_NOTIFY_BOTH word_walk(std::uint64_t words, std::uint64_t first, std::uint64_t stride)
        : words_(words), entry_(quotient(first, words)), word_(first - entry_ * words),
          entries_(quotient(stride, words)), rest_(stride - entries_ * words) {}

    [[nodiscard]] MPGPU_NOTIFY_BOTH std::uint64_t entry() const { return entry_; }
    [[nodiscard]] MPGPU_NOTIFY_BOTH std::uint64_t word() const { return word_; }
    MPGPU_NOTIFY_BOTH void advance() {
        entry_ += entries_;
        word_ += rest_;
        if (word_ >= words_) {
            word_ -= words_;
            ++entry_;
        }
    }

  private:
    std::uint64_t words_;
    std::uint64_t entry_;
    std::uint64_t word_;
    std::uint64_t entries_; ///< whole entries in the stride
    std::uint64_t rest_;    ///< remaining words of the stride
};

/// Returns the address of a word of an entry of a field.
template <class Word>
[[nodiscard]] MPGPU_NOTIFY_BOTH inline Word *word_at(const index_words &field, std::uint64_t entry,
                                                     std::uint64_t word) {
    return reinterpret_cast<Word *>(field.data + entry * field.stride_bytes) + word;
}

/// Use of the words of a message.
enum class word_use { gather, scatter, add };

/// Copies or adds some words of one field of one message with the threads of one block. Adjacent threads access
/// adjacent words of the message. A thread reads several words before it writes the first, to hide the latency of
/// memory.
template <class Word, word_use Use>
MPGPU_NOTIFY_BOTH inline void move_words(const notify_block &block, const index_work &work, const index_words &field,
                                         const index_part &part, std::byte *at, word_range some) {
    constexpr unsigned at_once = 4;
    const std::uint64_t stride = block.threads;
    Word *const message = reinterpret_cast<Word *>(at);
    word_walk walk(field.words, some.first + block.thread, stride);
    for (std::uint64_t i = some.first + block.thread; i < some.end; i += at_once * stride) {
        Word read[at_once] = {};
        Word *entries[at_once] = {};
        for (unsigned n = 0; n < at_once; ++n) {
            const std::uint64_t word = i + n * stride;
            if (word < some.end) {
                entries[n] = word_at<Word>(field, entry_of(work, part, walk.entry()), walk.word());
                read[n] = Use == word_use::gather ? *entries[n] : message[word];
                walk.advance();
            }
        }
        for (unsigned n = 0; n < at_once; ++n) {
            const std::uint64_t word = i + n * stride;
            if (word < some.end) {
                if constexpr (Use == word_use::gather) {
                    message[word] = read[n];
                } else if constexpr (Use == word_use::scatter) {
                    *entries[n] = read[n];
                } else {
                    *entries[n] += read[n];
                }
            }
        }
    }
}

/// Copies some words of one field of one message between the field and the message.
template <word_use Use>
MPGPU_NOTIFY_BOTH inline void copy_field(const notify_block &block, const index_work &work, const index_words &field,
                                         const index_part &part, std::byte *at, word_range some) {
    switch (field.word_bytes) {
    case sizeof(word_of_16):
        move_words<word_of_16, Use>(block, work, field, part, at, some);
        break;
    case sizeof(word_of_8):
        move_words<word_of_8, Use>(block, work, field, part, at, some);
        break;
    case sizeof(word_of_4):
        move_words<word_of_4, Use>(block, work, field, part, at, some);
        break;
    default:
        move_words<word_of_1, Use>(block, work, field, part, at, some);
    }
}

/// Copies or adds some words of one field of a received message to the field.
MPGPU_NOTIFY_BOTH inline void scatter_field(const notify_block &block, const index_work &work, const index_words &field,
                                            const index_part &part, std::byte *at, word_range some) {
    if (work.call.operation == index_operation::copy) {
        copy_field<word_use::scatter>(block, work, field, part, at, some);
    } else if (field.values == number::f32) {
        move_words<float, word_use::add>(block, work, field, part, at, some);
    } else {
        move_words<double, word_use::add>(block, work, field, part, at, some);
    }
}

/// Gathers the calling block's part of all messages. The last block to do so sets the flags of all messages.
MPGPU_NOTIFY_BOTH inline void gather_messages(const notify_block &block, const index_work &work,
                                              std::uint64_t exchange) {
    const index_call &call = work.call;
    const bool reverse = call.operation == index_operation::reverse_add;
    const std::uint64_t *const starts = reverse ? work.receives : work.sends;
    for (std::uint32_t f = 0; f < call.count; ++f) {
        const index_words &field = call.fields[f];
        const word_range own = share_of(starts[work.count] * field.words, block);
        if (own.first >= own.end) {
            continue;
        }
        for (std::uint32_t m = message_of(starts, work.count, quotient(own.first, field.words));
             m < work.count && starts[m] * field.words < own.end; ++m) {
            const index_message &message = work.messages[m];
            std::byte *const at =
                message.there + exchange % 2 * message.there_half + offset_of(call, f, starts[m + 1] - starts[m]);
            copy_field<word_use::gather>(block, work, field, reverse ? message.receive : message.send, at,
                                         part_of(own, starts[m] * field.words, starts[m + 1] * field.words));
        }
    }
    if (is_last_block(block, &work.state->packed)) {
        for (std::uint32_t m = block.thread; m < work.count; m += block.threads) {
            if (work.messages[m].there_flag != nullptr) {
                mpgpu::detail::store<mpgpu::detail::reach::system>(work.messages[m].there_flag, exchange);
            }
        }
        if (block.thread == 0) {
            mpgpu::detail::store<mpgpu::detail::reach::device>(&work.state->gathered, exchange);
        }
    }
}

/// Waits for the messages `first` to `end - 1`, and calls `arrived(m)` with all threads of the block when message `m`
/// has arrived. Returns false if no more messages will arrive.
template <class Arrived>
MPGPU_NOTIFY_BOTH inline bool wait_for_messages(const notify_block &block, const index_work &work, std::uint32_t first,
                                                std::uint32_t end, std::uint64_t exchange, const Arrived &arrived) {
    constexpr std::uint32_t at_once = 32; // number of bits of `left`
    for (; first < end; first += at_once) {
        const std::uint32_t count = end - first < at_once ? end - first : at_once;
        const auto flag_of = [&work, first](std::uint32_t m) -> const std::uint64_t * {
            return work.messages[first + m].here_flag;
        };
        std::uint32_t left = ~std::uint32_t{0} >> (at_once - count);
        while (left != 0) {
            const std::uint32_t m = wait_for_any(block, flag_of, count, work.gone, left, exchange);
            if (m == none_arrives) {
                return false;
            }
            arrived(first + m);
            left &= ~(std::uint32_t{1} << m);
        }
    }
    return true;
}

/// Waits for each message and scatters the calling block's part of it. Returns false if no more messages will arrive.
MPGPU_NOTIFY_BOTH inline bool scatter_messages(const notify_block &block, const index_work &work,
                                               std::uint64_t exchange) {
    const index_call &call = work.call;
    const std::uint64_t *const starts = work.receives;
    std::uint64_t first = ~std::uint64_t{0}; // first entry of which this block scatters some words
    std::uint64_t end = 0;                   // last such entry, plus 1
    for (std::uint32_t f = 0; f < call.count; ++f) {
        const std::uint64_t words = call.fields[f].words;
        const word_range own = share_of(starts[work.count] * words, block);
        if (own.first < own.end) {
            const std::uint64_t lowest = quotient(own.first, words);
            const std::uint64_t highest = quotient(own.end - 1, words);
            first = first < lowest ? first : lowest;
            end = end > highest + 1 ? end : highest + 1;
        }
    }
    const auto scatter = [&](std::uint32_t m) {
        const index_message &message = work.messages[m];
        for (std::uint32_t f = 0; f < call.count; ++f) {
            const index_words &field = call.fields[f];
            const word_range own = share_of(starts[work.count] * field.words, block);
            scatter_field(block, work, field, message.receive,
                          message.here + exchange % 2 * message.here_half +
                              offset_of(call, f, starts[m + 1] - starts[m]),
                          part_of(own, starts[m] * field.words, starts[m + 1] * field.words));
        }
    };
    if (first < end && !wait_for_messages(block, work, message_of(starts, work.count, first),
                                          message_of(starts, work.count, end - 1) + 1, exchange, scatter)) {
        return false;
    }
    for (std::uint32_t m = block.index; m < work.count; m += block.blocks) {
        if (!wait_for_messages(block, work, m, m + 1, exchange, [](std::uint32_t) {})) {
            return false;
        }
    }
    return true;
}

/// Adds the contributions of all messages to the calling block's part of one field.
template <class Number>
MPGPU_NOTIFY_BOTH inline void add_terms(const notify_block &block, const index_work &work, std::uint32_t f,
                                        std::uint64_t exchange) {
    const index_words &field = work.call.fields[f];
    const word_range own = share_of(work.target_count * field.words, block);
    word_walk walk(field.words, own.first + block.thread, block.threads);
    for (std::uint64_t i = own.first + block.thread; i < own.end; i += block.threads, walk.advance()) {
        const index_target &target = work.targets[walk.entry()];
        auto *const to = word_at<Number>(field, target.entry, walk.word());
        Number sum = *to;
        for (std::uint64_t t = target.first; t < work.targets[walk.entry() + 1].first; ++t) {
            const index_term term = work.terms[t];
            const index_message &message = work.messages[term.message];
            const std::uint64_t entries = work.sends[term.message + 1] - work.sends[term.message];
            const std::byte *const at = message.here + exchange % 2 * message.here_half +
                                        offset_of(work.call, f, entries) + term.position * field.entry_bytes;
            sum += reinterpret_cast<const Number *>(at)[walk.word()];
        }
        *to = sum;
    }
}

/// Waits for all messages, and adds their contributions to the calling block's part of the fields. Returns false if no
/// more messages will arrive.
MPGPU_NOTIFY_BOTH inline bool add_messages(const notify_block &block, const index_work &work, std::uint64_t exchange) {
    if (!wait_for_messages(block, work, 0, work.count, exchange, [](std::uint32_t) {})) {
        return false;
    }
    for (std::uint32_t f = 0; f < work.call.count; ++f) {
        if (work.call.fields[f].values == number::f32) {
            add_terms<float>(block, work, f, exchange);
        } else {
            add_terms<double>(block, work, f, exchange);
        }
    }
    return true;
}

/// Performs the calling block's work in an exchange by index lists. Blocks wait for other ranks, whose blocks wait for
/// all blocks of this rank. Therefore all blocks must run simultaneously.
MPGPU_NOTIFY_BOTH inline void exchange_indexed(const notify_block &block, const index_work &work) {
    const std::uint64_t exchange = work.state->exchange + 1; // the last block that ends increments `state->exchange`
    // All blocks still gather their entries in the exchange in which a rank was lost. Later exchanges do nothing.
    const std::uint64_t abandoned = mpgpu::detail::load<mpgpu::detail::reach::device>(&work.state->abandoned);
    if (abandoned != 0 && abandoned < exchange) {
        return;
    }
    if (work.call.gathers) {
        gather_messages(block, work, exchange);
    }
    if (!work.call.scatters) {
        return;
    }
    if (work.call.gathers && work.overlaps) {
        if (block.thread == 0) {
            mpgpu::detail::poll<mpgpu::detail::reach::device>(&work.state->gathered, exchange);
        }
        block.synchronize();
    }
    const bool reverse = work.call.operation == index_operation::reverse_add;
    if (!(reverse ? add_messages(block, work, exchange) : scatter_messages(block, work, exchange)) &&
        block.thread == 0) {
        mpgpu::detail::store<mpgpu::detail::reach::device>(&work.state->abandoned, exchange);
    }
    if (is_last_block(block, &work.state->ended) && block.thread == 0) {
        work.state->exchange = exchange;
    }
}

} // namespace mpgpu::halo::detail

#endif // MPGPU_HALO_INDEX_KERNEL_HPP
