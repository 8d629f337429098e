// Random numbers of the device: the CPU's numbers, from a state such as that of Philox generators.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace sim {

// Lets operators without a generator of their own use the device's, as on a GPU, or else the CPU's, so that runs on both
// can be compared in every bit. The CPU's is the default.
void use_generators_of_device(bool on);

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// Generator of the CPU for one operator, which a generator of the device has seeded: no schedule changes its numbers.
// `given` is the operator's argument; nothing stands for the default generator. Nothing is returned where that is the
// CPU's, whose state after the operator only the kernel knows.
std::optional<at::Generator> seeded_generator(const std::optional<at::Generator>& given, int device);

} // namespace sim
