// The devices, and how operators get into their streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <string>
#include <vector>

#include "scheduler.h"
#include "trace.h"

namespace sim {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

// Makes this the process's accelerator; to be called once.
void register_device();

// Devices that the machine appears to have, at most kMaxDevices.
void use_devices(int count);
int device_count();

// Device with this index; without one the device on which this thread works.
c10::Device device_with(c10::DeviceIndex index);

// Streams as torch names them: a device's default stream is 0, each other has its number in the scheduler.
c10::Stream stream_of(int64_t number);
int64_t number_of(const c10::Stream& stream);

// While it lives, this thread works on another device.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) : before_(exchange_device(device.index())) {}
  ~OnDevice() {
    exchange_device(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_;
};

// Queues an operator on the current stream of the device with the first of these bytes, with what it reads and writes.
// `run` owns nothing: it must reach memory by addresses alone, as a kernel does, so that what is freed too early is
// overwritten.
Point queue(
    const std::string& name, std::vector<Range> ranges, std::function<void()> run, bool is_collective = false);

// Number of an event for the trace.
int64_t new_event();

// Lets a stream wait for all that another one has so far.
void wait_for(int64_t waiting, int64_t other);

} // namespace sim
