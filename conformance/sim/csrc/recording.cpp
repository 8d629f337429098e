#include "recording.h"

#include <pybind11/stl.h>

#include "allocator.h"
#include "device.h"
#include "lock.h"
#include "sites.h"

namespace py = pybind11;

namespace sim {

namespace {

void start_sites(const std::vector<std::pair<std::string, int>>& owners) {
  Lock lock;
  std::vector<std::pair<std::string, Owner>> begins;
  for (const auto& [begin, owner] : owners) begins.emplace_back(begin, static_cast<Owner>(owner));
  sites().start(std::move(begins));
}

py::object exported(const Place& place) {
  if (place.file.empty()) return py::none();
  return py::make_tuple(place.file, place.line, place.function);
}

// (program, torch, node of autograd) by number - 1; a place is (file, line, function), or None.
py::list stop_sites() {
  Lock lock;
  sites().stop();
  py::list all;
  for (const Site& site : sites().all())
    all.append(py::make_tuple(exported(site.program), exported(site.torch), site.node));
  return all;
}

py::tuple take_execution() {
  Lock lock;
  Execution execution = trace().take_execution();
  py::list reads;
  for (const Read& read : execution.reads) reads.append(py::make_tuple(read.number, read.digest));
  return py::make_tuple(execution.order, reads);
}

// (number of the allocation, bytes, digest) of all memory in use, when all that is queued has run.
std::vector<std::tuple<int64_t, size_t, uint64_t>> live() {
  Lock lock;
  scheduler().drain();
  std::vector<std::tuple<int64_t, size_t, uint64_t>> all;
  for (int device = 0; device < device_count(); ++device)
    for (const auto& block : allocator(device).live()) all.push_back(block);
  return all;
}

} // namespace

void bind_recording(py::module_& module) {
  module.def("start_sites", &start_sites);
  module.def("stop_sites", &stop_sites);
  module.def("take_execution", &take_execution);
  module.def("live", &live);
}

} // namespace sim
