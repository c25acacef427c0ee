// Access of contexts to each other's memory, which mpgpu enables for its plans: the program is told what it would be
// without.
#pragma once

#include "driver.hpp"

namespace mpgpu_preload {

/// What `cuCtxEnablePeerAccess` says to the program when the driver says `code`.
result enabled_access(context peer, result code);

/// Whether the program has enabled the access, and not mpgpu alone; it has not from then on.
bool disabled_access(context peer);

} // namespace mpgpu_preload
