// The device, and how operators get into its streams.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "scheduler.h"
#include "trace.h"

namespace sim {

inline const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

// Maps the memory and makes this the process's device; to be called once, after the last fork.
void register_device();

// Queues an operator on the current stream, with what it reads and writes. `run` owns nothing: it must reach memory by
// addresses alone, as a kernel does, so that what is freed too early is overwritten.
Point queue(
    const std::string& name, std::vector<Range> ranges, std::function<void()> run, bool is_collective = false);

// Number of an event for the trace.
int64_t new_event();

} // namespace sim
