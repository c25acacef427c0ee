// Hides from the program that mpgpu enables peer access between contexts for its plans. The program gets the results
// that it would get without mpgpu.
#pragma once

#include "driver.hpp"

namespace mpgpu_preload {

/// Records that the program enables access to the context `peer`. `code` is the result of the driver's
/// `cuCtxEnablePeerAccess`. Returns the result that the program would get without mpgpu.
result enabled_access(context peer, result code);

/// Records that the program disables access to the context `peer`. Returns true if the program itself had enabled it.
bool disabled_access(context peer);

} // namespace mpgpu_preload
