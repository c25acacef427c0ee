// CPU build of the block copy.

#include "block_copy.hpp"

namespace mpgpu {

namespace {

// The CPU does not pace its stores.
struct NoWait {
    void operator()() const {}
};

struct IndexReport {
    void operator()(uint64_t report, uint64_t position, uint64_t index) const {
        if (report != 0) {
            auto *words = reinterpret_cast<uint64_t *>(static_cast<uintptr_t>(report));
            words[0] = position;
            words[1] = index;
        }
    }
};

} // namespace

void copy_blocks_on_cpu(const BlockList &list, uint32_t groups, uint32_t lanes) noexcept {
    for (uint32_t group = 0; group < groups; ++group) {
        for (uint32_t lane = 0; lane < lanes; ++lane) {
            copy_blocks(list, group, groups, lane, lanes, NoWait{}, IndexReport{});
        }
    }
}

} // namespace mpgpu
