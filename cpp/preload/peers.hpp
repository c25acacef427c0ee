// Hides from the program that mpgpu enables access between contexts for its plans: the program gets the results that it
// would get without mpgpu.
#pragma once

#include "driver.hpp"

namespace mpgpu_preload {

/// Returns the program's result of `cuCtxEnablePeerAccess` when the driver returned `code`.
result enabled_access(context peer, result code);

/// Records that the program disables the access. Returns true if the program had enabled it, and not only mpgpu.
bool disabled_access(context peer);

} // namespace mpgpu_preload
