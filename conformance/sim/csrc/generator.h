// Random numbers of the device: the CPU's numbers, from a state such as that of Philox generators.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace sim {

// Lets operators without a generator of their own use the device's, as on a GPU, or else the CPU's, so that runs on both
// can be compared in every bit. The CPU's is the default.
void use_generators_of_device(bool on);

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// While it lives, the CPU's default generator is in the state of a generator of the device, for an operator that samples
// on the CPU what a device is to have. `given` is the operator's argument; nothing stands for the default generator.
class LentState {
 public:
  LentState(const std::optional<at::Generator>& given, int device);
  ~LentState();
  LentState(const LentState&) = delete;
  LentState& operator=(const LentState&) = delete;

 private:
  at::Tensor saved_;
};

} // namespace sim
