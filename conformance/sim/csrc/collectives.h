// Collectives of the device: gloo's, in the order of streams.
#pragma once

#include <pybind11/pybind11.h>

namespace sim {

// How ProcessGroupNCCL sees to it that the memory of a collective is not handed out again too early.
enum class Lifetime {
  kHeldUntilWait, // since torch 2.8: a stream of its own for asynchronous ones alone; their tensors are held until `wait`
  kAlwaysOwnStream, // up to 2.7, TORCH_NCCL_AVOID_RECORD_STREAMS=1: its stream for all; tensors are held until `wait`
  kRecordStream, // up to 2.7: its stream for all; record_stream for the tensors of most
};

// Defines `make_backend(gloo, limit_ms)`: a backend for tensors of the device and of the host, over gloo's backend of a
// group with this time limit; and `use_lifetime(lifetime)` for all collectives that are issued from then on.
void bind_collectives(pybind11::module_& module);

} // namespace sim
