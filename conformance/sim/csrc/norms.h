// RMSNorm in one operator.
#pragma once

namespace sim {

// Gives the device the operator; without it torch composes RMSNorm of others.
void fuse_norms();

} // namespace sim
