// What a process leaves of its run for the search of races.
#pragma once

#include <pybind11/pybind11.h>

namespace sim {

// Defines `start_sites(owners)`, `stop_sites() -> sites`, `take_execution() -> (order, reads)` and `live() -> blocks`.
void bind_recording(pybind11::module_& module);

} // namespace sim
