// Batches of many small pieces between pinned host memory and a GPU. The driver moves these one by one: 10,000 pieces
// of 16 KiB at 5 GB/s, and holds the caller meanwhile (one H200, driver 580). A kernel of four blocks moves them at the
// rate of the link.
#include "batches.hpp"

#include "copies.hpp"
#include "report.hpp"
#include "settings.hpp"

#include <mpgpu/mpgpu.h>

#include <algorithm>
#include <vector>

namespace mpgpu_preload {
namespace {

/// Copies of a batch for which a launch pays (26 halo messages: 25.6 us by the driver's batch, 13.7 by a kernel).
constexpr std::size_t fewest = 16;
/// Mean bytes from which the driver's batch is as fast: a piece costs it 0.4 us beyond its bytes, and the kernel is
/// slower than a copy engine by a tenth, or, where it writes host memory, by a quarter.
constexpr std::size_t most_to_gpu = std::size_t{128} << 10;
constexpr std::size_t most_to_host = std::size_t{48} << 10;

constexpr unsigned host_type = 1;
constexpr unsigned device_type = 2;
constexpr int in_stream_order = 1;
constexpr int in_any_order = 3;

/// True if the sources may be read when the stream comes to the batch.
bool are_read_in_stream(const batch &copies) {
    return copies.attributes != nullptr &&
           std::all_of(copies.attributes, copies.attributes + copies.attribute_count, [](const batch_attributes &of) {
               return of.source_access == in_stream_order || of.source_access == in_any_order;
           });
}

/// Memory that the copies of one batch lie in.
class known_memory {
  public:
    /// The type of the allocation that holds a range; 0 if a kernel may not reach it.
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

/// The direction of a batch: every copy has one end in pinned host memory and one in memory of a GPU, and all the same.
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

/// True if the batch was enqueued.
bool enqueue(const batch &copies, stream in, mp_context_t context) {
    // The driver refuses the default stream here, and a graph keeps no list.
    if (in == nullptr || !are_read_in_stream(copies) || is_being_captured(in)) {
        return false;
    }
    std::size_t total = 0;
    const outcome way = direction_of(copies, total);
    const std::size_t most = way == outcome::host_to_device ? most_to_gpu : most_to_host;
    if (way == outcome::count || total / copies.count > most) {
        return false;
    }
    std::vector<mp_segment_t> pieces(copies.count);
    for (std::size_t at = 0; at < copies.count; ++at) {
        // NOLINTBEGIN(performance-no-int-to-ptr): the driver's pointers are numbers
        pieces[at] = {reinterpret_cast<void *>(copies.dst[at]), reinterpret_cast<const void *>(copies.src[at]),
                      copies.bytes[at]};
        // NOLINTEND(performance-no-int-to-ptr)
    }
    if (mp_copy_pieces(context, pieces.data(), pieces.size(), nullptr, static_cast<mp_stream_t>(in), nullptr) !=
        MP_SUCCESS) {
        return false;
    }
    count(way, total);
    return true;
}

} // namespace

bool take_batch(const batch &copies, stream in) noexcept {
    if (copies.count < fewest || copies.dst == nullptr || copies.src == nullptr || copies.bytes == nullptr) {
        return false;
    }
    try {
        return with_context([&](mp_context_t context) { return enqueue(copies, in, context); });
    } catch (...) { // Before anything was enqueued.
        return false;
    }
}

} // namespace mpgpu_preload
