// Kernels of the device's own operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "scheduler.h"

namespace sim {

using Tensors = std::vector<at::Tensor>;

// Computes on CPU tensors over the bytes of inputs and outputs. Those that were not defined are not.
using Kernel = std::function<void(const Tensors& from, const Tensors& to)>;

// Queues a kernel on the current stream. Like all that is queued it owns no memory of the device.
Point launch(
    const std::string& name, const Tensors& inputs, const Tensors& outputs, Kernel kernel, bool is_collective = false);

} // namespace sim
