// Operators by the CPU's kernels.
#pragma once

namespace sim {

// Lets each operator for which the CPU has a kernel use it, although torch could compose it from others for a device
// without: these round otherwise, or call the variant with `out`. To be called when all others are registered.
void follow_cpu();

} // namespace sim
