// What Python sees of the device, beyond what torch.accelerator offers.
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "collectives.h"
#include "device.h"
#include "fallback.h"
#include "generator.h"
#include "lock.h"
#include "memory_map.h"
#include "norms.h"
#include "pinned.h"
#include "recording.h"
#include "statistics.h"

namespace py = pybind11;

namespace sim {

namespace {

// (block, begin, end) in bytes from the block's begin; blocks of the device have positive numbers, pinned ones negative.
py::tuple located(const Range& range) {
  auto* address = reinterpret_cast<void*>(range.begin);
  auto [block, base] = is_device_address(address) ? allocator_at(address).segment_of(range.begin)
                                                  : pinned_memory().block_of(range.begin);
  return py::make_tuple(block, range.begin - base, range.end - base);
}

py::tuple exported(const Record& record) {
  py::list reads, writes;
  for (const Range& range : record.ranges)
    if (range.begin < range.end) (range.write ? writes : reads).append(located(range));
  return py::make_tuple(
      record.kind,
      record.stream,
      record.name,
      record.event,
      py::tuple(reads),
      py::tuple(writes),
      record.number,
      record.site);
}

py::list stop_trace() {
  Lock lock;
  py::list all;
  for (const Record& record : trace().stop()) all.append(exported(record));
  return all;
}

// The host itself uses pinned memory.
void host_access(const std::string& name, uint64_t begin, uint64_t bytes, bool write) {
  Lock lock;
  if (bytes && pinned_memory().contains(reinterpret_cast<void*>(begin)))
    trace().add("host", -1, name, 0, {{begin, begin + bytes, write}});
}

void follow(int policy, int64_t first, int64_t last) {
  Lock lock;
  scheduler().follow(static_cast<Policy>(policy), first, last);
}

void poison(bool on) {
  Lock lock;
  for (int device = 0; device < kMaxDevices; ++device) allocator(device).poison(on);
  pinned_memory().poison(on);
}

py::dict counts() {
  Lock lock;
  py::dict all;
  all["operators"] = statistics().operators;
  all["inferences"] = statistics().inferences;
  all["executed"] = scheduler().executed();
  all["streams"] = scheduler().count();
  all["waits"] = py::dict();
  for (const auto& [name, times] : statistics().waits) all["waits"][name.c_str()] = times;
  return all;
}

} // namespace

py::list snapshot(int device) {
  Lock lock;
  py::list segments;
  for (const SegmentSnapshot& segment : allocator(device).snapshot()) {
    py::list blocks;
    uint64_t allocated = 0, active = 0, requested = 0;
    for (const Block& block : segment.blocks) {
      allocated += block.in_use ? block.bytes : 0;
      active += block.in_use || block.pending ? block.bytes : 0;
      requested += block.in_use ? block.requested_bytes : 0;
      const char* state = block.in_use ? "active_allocated" : block.pending ? "active_awaiting_free" : "inactive";
      blocks.append(py::dict(
          py::arg("address") = reinterpret_cast<uint64_t>(block.begin),
          py::arg("size") = block.bytes,
          py::arg("requested_size") = block.in_use ? block.requested_bytes : 0,
          py::arg("state") = state));
    }
    segments.append(py::dict(
        py::arg("device") = device,
        py::arg("address") = segment.address,
        py::arg("total_size") = segment.bytes,
        py::arg("allocated_size") = allocated,
        py::arg("active_size") = active,
        py::arg("requested_size") = requested,
        py::arg("stream") = stream_of(segment.stream).id(),
        py::arg("segment_type") = segment.small ? "small" : "large",
        py::arg("segment_pool_id") = py::make_tuple(0, 0),
        py::arg("is_expandable") = false,
        py::arg("blocks") = blocks));
  }
  return segments;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  register_device();
  follow_cpu();
  bind_collectives(module);
  module.attr("MEMORY_BYTES") = kMemoryBytes;
  module.def("use_devices", &use_devices);
  module.def("device_count", &device_count);
  module.def("use_generators_of_device", &use_generators_of_device);
  module.def("default_generator", &default_generator);
  module.def("snapshot", &snapshot);
  module.def("is_in_bad_fork", &is_in_bad_fork);
  bind_recording(module);
  module.def("follow", &follow);
  module.def("poison", &poison);
  module.def("start_trace", [] {
    Lock lock;
    trace().start();
  });
  module.def("stop_trace", &stop_trace);
  module.def("trace_size", [] {
    Lock lock;
    return trace().size();
  });
  module.def("host_access", &host_access);
  module.def("fuse_norms", &fuse_norms);
  module.def("counts", &counts);
}

} // namespace sim
