#include "peers.hpp"

#include <mutex>
#include <set>
#include <utility>

namespace mpgpu_preload {
namespace {

std::mutex lock;

/// Peer accesses that the program has enabled, as pairs of contexts (the accessing context, the accessed context). The
/// set is never destroyed, because threads may query it while the process ends.
std::set<std::pair<context, context>> &enabled() {
    static auto &all = *new std::set<std::pair<context, context>>;
    return all;
}

context current() {
    context found = nullptr;
    return call(symbol::cuCtxGetCurrent, &found) == success ? found : nullptr;
}

} // namespace

result enabled_access(context peer, result code) {
    if (code != success && code != peer_access_already_enabled) {
        return code;
    }
    const std::lock_guard guard(lock);
    const bool is_new = enabled().emplace(current(), peer).second;
    return is_new ? success : code;
}

bool disabled_access(context peer) {
    const std::lock_guard guard(lock);
    return enabled().erase({current(), peer}) != 0;
}

} // namespace mpgpu_preload
