// Collectives of the device: gloo's, in the order of streams.
#pragma once

#include <pybind11/pybind11.h>

namespace sim {

// Defines `make_backend(gloo)`: a backend for tensors of the device and of the host, over gloo's backend of a group.
void bind_collectives(pybind11::module_& module);

} // namespace sim
