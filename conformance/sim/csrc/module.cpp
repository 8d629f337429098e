// What Python sees of the device, beyond what torch.accelerator offers.
#include <pybind11/pybind11.h>

#include "allocator.h"
#include "collectives.h"
#include "device.h"
#include "fallback.h"
#include "lock.h"
#include "memory_map.h"
#include "norms.h"
#include "pinned.h"
#include "statistics.h"

namespace py = pybind11;

namespace sim {

namespace {

// (block, begin, end) in bytes from the block's begin; blocks of the device have positive numbers, pinned ones negative.
py::tuple located(const Range& range) {
  bool on_device = is_device_address(reinterpret_cast<void*>(range.begin));
  auto [block, base] = on_device ? allocator().segment_of(range.begin) : pinned_memory().block_of(range.begin);
  return py::make_tuple(block, range.begin - base, range.end - base);
}

py::tuple exported(const Record& record) {
  py::list reads, writes;
  for (const Range& range : record.ranges)
    if (range.begin < range.end) (range.write ? writes : reads).append(located(range));
  return py::make_tuple(
      record.kind, record.stream, record.name, record.event, py::tuple(reads), py::tuple(writes));
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

void follow(int policy, uint64_t seed, int64_t starved) {
  Lock lock;
  scheduler().follow(static_cast<Policy>(policy), seed, starved);
}

void poison(bool on) {
  Lock lock;
  allocator().poison(on);
  pinned_memory().poison(on);
}

py::dict counts() {
  Lock lock;
  py::dict all;
  all["operators"] = statistics().operators;
  all["executed"] = scheduler().executed();
  all["streams"] = scheduler().count();
  all["waits"] = py::dict();
  for (const auto& [name, times] : statistics().waits) all["waits"][name.c_str()] = times;
  return all;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  register_device();
  follow_cpu();
  bind_collectives(module);
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
