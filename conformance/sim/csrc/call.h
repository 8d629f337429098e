// A call of an operator that has no kernel of its own.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "inferred.h"
#include "views.h"

namespace sim {

using Stack = torch::jit::Stack;

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack);

  // Device of the first tensor on one, or the one that an argument names, or the current one.
  c10::Device device() const {
    return device_;
  }
  // Gives the operator a generator of its own, seeded now; false where it samples from the CPU's.
  bool seed();
  void refuse_other_layouts() const;
  void refuse_mixed_devices() const;
  bool is_random() const;
  bool only_overwrites_self() const;

  // Result tensors, allocated on the device, or nothing if only a run tells their shapes, or fails.
  std::optional<Values> infer();
  void run_later(Values results, Stack& stack);
  void run_now(Stack& stack);
  void draw_now(Stack& stack);

 private:
  bool writes(size_t argument) const;
  bool has_out() const;
  bool is_input(const c10::IValue& output) const;
  bool overwrites_input() const;
  std::optional<size_t> argument_returned_as(size_t result) const;
  bool returns_new_tensors() const;
  std::string name() const;
  std::vector<Range> ranges(const Values& results) const;
  Values host_arguments(Twins twins) const;
  Values meta_arguments() const;
  Values zero_arguments() const;
  Values float_arguments() const;
  Inferred infer_on_meta();
  bool leaves_arguments_as_they_are() const;
  void try_out(Values arguments);
  bool resizes_in_place() const;
  bool lays_out_outputs() const;
  bool overlaps_what_it_writes() const;
  bool is_power_of_bools() const;
  bool may_lose_strides() const;
  void restride_as_in_float();
  void lay_out_arguments(const Values& others) const;
  void mark_arguments(const Values& others) const;
  std::vector<std::pair<at::Tensor, at::Tensor>> moved_arguments(const Values& twins) const;
  at::Tensor on_device(const at::Tensor& tensor) const;
  std::optional<Values> on_device(const Inferred& inferred) const;

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Values arguments_;
  c10::Device device_;
  // Arguments in place of the operator's own, as it has left them, and its results.
  Values tried_arguments_;
  Stack tried_results_;
};

std::vector<at::Tensor> tensors_in(const c10::IValue& value);

// The same value, or another kind of device in place of this one.
c10::IValue with_device(const c10::IValue& value, c10::DeviceType type);

// Tensor in the layout of another, whose elements nobody has written.
at::Tensor empty_on(c10::Device device, const at::Tensor& like);

// A number of the host, as a kernel gets it.
at::Tensor passed_by_value(const at::Tensor& number);

} // namespace sim
