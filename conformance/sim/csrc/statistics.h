// Counts of what the device was asked to do.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace sim {

struct Statistics {
  int64_t operators = 0; // without kernel of its own
  int64_t inferences = 0; // calls of operators on meta tensors, for the layouts of their results
  std::map<std::string, int64_t> waits; // operators for whose result the host had to wait, by name
};

inline Statistics& statistics() {
  static Statistics instance;
  return instance;
}

} // namespace sim
