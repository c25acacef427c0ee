// Accelerates batches of many small copies between pinned host memory and a GPU. The driver executes the copies of a
// batch one after another and blocks the caller during this time: 10,000 copies of 16 KiB reach 5 GB/s (one H200,
// driver 580). A kernel with four thread blocks fills the link. Writes to host memory are paced and reach 40 to 48 of
// 55 GB/s.
#include "batches.hpp"

#include "copies.hpp"
#include "report.hpp"
#include "settings.hpp"

#include <mpgpu/mpgpu.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace mpgpu_preload {
namespace {

/// Minimum number of copies in a batch for which a kernel is faster than the driver's batch. A batch of 26 halo
/// messages takes 25.6 us with the driver and 13.7 us with a kernel.
constexpr std::size_t fewest = 16;
/// Maximum mean size of the copies for which a kernel is faster than the driver's batch, bytes. Larger copies are at
/// least as fast with the driver: at 64 KiB, its batch reaches 42 to 52 GB/s to an H200.
constexpr std::size_t most_bytes = std::size_t{48} << 10;

constexpr unsigned host_type = 1;
constexpr unsigned device_type = 2;
constexpr int in_stream_order = 1;
constexpr int in_any_order = 3;

/// Returns true if the sources may be read when the batch runs in its stream, instead of during the call.
bool are_read_in_stream(const batch &copies) {
    return copies.attributes != nullptr &&
           std::all_of(copies.attributes, copies.attributes + copies.attribute_count, [](const batch_attributes &of) {
               return of.source_access == in_stream_order || of.source_access == in_any_order;
           });
}

/// Memory that contains the sources and destinations of one batch. The driver is queried once for each allocation.
class known_memory {
  public:
    /// Returns the type of the allocation that contains a range (`CUmemorytype`). Returns 0 if kernels cannot access
    /// the range: the memory is pageable, managed or unknown, or the range extends beyond the allocation.
    unsigned type_of(device_pointer address, std::size_t bytes) {
        for (const memory &known : found_) {
            if (address - known.base < known.bytes && bytes <= known.bytes - (address - known.base)) {
                return known.type;
            }
        }
        const memory found = find_memory(address);
        const bool is_inside = address - found.base < found.bytes && bytes <= found.bytes - (address - found.base);
        if (found.managed != 0 || !is_inside || (found.type != host_type && found.type != device_type)) {
            return 0;
        }
        found_.push_back(found);
        return found.type;
    }

  private:
    std::vector<memory> found_;
};

/// Returns the direction of a batch: `host_to_device` or `device_to_host` if all copies have this direction and their
/// host memory is pinned, and otherwise `count`. Adds the sizes of the copies to `total`.
outcome direction_of(const batch &copies, std::size_t &total) {
    known_memory known;
    outcome all = outcome::count;
    for (std::size_t at = 0; at < copies.count; ++at) {
        if (copies.bytes[at] == 0) {
            continue;
        }
        const unsigned to = known.type_of(copies.dst[at], copies.bytes[at]);
        const unsigned from = known.type_of(copies.src[at], copies.bytes[at]);
        const outcome own = to == device_type && from == host_type   ? outcome::host_to_device
                            : to == host_type && from == device_type ? outcome::device_to_host
                                                                     : outcome::count;
        if (own == outcome::count || (all != outcome::count && own != all)) {
            return outcome::count;
        }
        all = own;
        total += copies.bytes[at];
    }
    return all;
}

/// Enqueues the batch with the context `made`, and returns true on success.
bool enqueue(const batch &copies, stream in, mp_context_t made, std::uint64_t relays) {
    // The driver rejects batches in the legacy default stream and must return its own error. mpgpu rejects lists of
    // pieces in a captured stream.
    if (in == nullptr || !are_read_in_stream(copies) || is_being_captured(in)) {
        return false;
    }
    std::size_t total = 0;
    const outcome way = direction_of(copies, total);
    if (way == outcome::count || total / copies.count > most_bytes) {
        return false;
    }
    std::vector<mp_segment_t> pieces(copies.count);
    for (std::size_t at = 0; at < copies.count; ++at) {
        // NOLINTBEGIN(performance-no-int-to-ptr): the driver's pointers are integers
        pieces[at] = {reinterpret_cast<void *>(copies.dst[at]), reinterpret_cast<const void *>(copies.src[at]),
                      copies.bytes[at]};
        // NOLINTEND(performance-no-int-to-ptr)
    }
    mp_piece_options_t options = MP_PIECE_OPTIONS_INIT;
    options.relay_gpus = relays;
    if (mp_copy_pieces(made, pieces.data(), pieces.size(), &options, static_cast<mp_stream_t>(in), nullptr) !=
        MP_SUCCESS) {
        return false;
    }
    count(way, total);
    return true;
}

} // namespace

bool take_batch(const batch &copies, stream in) noexcept {
    if (is_inside_mpgpu() || copies.dst == nullptr || copies.src == nullptr || copies.bytes == nullptr) {
        return false;
    }
    try {
        if (copies.count >= fewest &&
            with_context([&](mp_context_t made, std::uint64_t relays) { return enqueue(copies, in, made, relays); })) {
            return true;
        }
    } catch (...) { // Exceptions are thrown only before the batch is enqueued.
    }
    if (asked().counts_all) {
        count(outcome::batched, std::accumulate(copies.bytes, copies.bytes + copies.count, std::size_t{0}));
    }
    return false;
}

} // namespace mpgpu_preload
