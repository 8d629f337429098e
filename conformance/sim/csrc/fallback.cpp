// Every operator that has no kernel of its own: the CPU's kernel, queued on the current stream.
//
// The operator is called on meta tensors for the shapes of its results; these are allocated at once, and the kernel
// runs when the schedule wants. Results that cannot be known beforehand make the host wait, as on a GPU (`nonzero`).
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "device.h"
#include "generator.h"
#include "lock.h"
#include "statistics.h"
#include "views.h"

namespace sim {

namespace {

using Stack = torch::jit::Stack;

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), schema_(op.schema()), arguments_(torch::jit::pop(stack, schema_.arguments().size())) {}

  // Device of the first tensor on one, or the one that an argument names, or the current one.
  c10::Device device() const;
  // Generator among the arguments, which is left out from then on.
  std::optional<at::Generator> take_generator();
  void refuse_views() const;
  void refuse_mixed_devices() const;
  bool is_random() const;
  bool only_overwrites_self() const;

  // Result tensors, allocated on the device, or nothing if only a run tells their shapes.
  std::optional<std::vector<c10::IValue>> infer();
  void run_later(std::vector<c10::IValue> results, Stack& stack);
  void run_now(Stack& stack);
  void draw_now(Stack& stack);

 private:
  bool writes(size_t argument) const;
  std::optional<size_t> argument_returned_as(size_t result) const;
  bool returns_new_tensors() const;
  std::string name() const;
  std::vector<Range> ranges(const std::vector<c10::IValue>& results) const;
  std::vector<c10::IValue> host_arguments() const;
  std::vector<c10::IValue> meta_arguments() const;
  void resize_outputs(const std::vector<c10::IValue>& meta);

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::vector<c10::IValue> arguments_;
};

c10::IValue with_device(const c10::IValue& value, c10::DeviceType type) {
  return value.isDevice() && value.toDevice().type() == kDeviceType ? c10::IValue(c10::Device(type)) : value;
}

at::Tensor on_meta(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device).pinned_memory(false));
}

void copy_results(const std::vector<c10::IValue>& to, const Stack& from) {
  for (size_t k = 0; k < to.size(); ++k) {
    std::vector<at::Tensor> targets, sources;
    for_each_tensor(to[k], [&](const at::Tensor& tensor) { targets.push_back(tensor); });
    for_each_tensor(from[k], [&](const at::Tensor& tensor) { sources.push_back(tensor); });
    for (size_t j = 0; j < targets.size(); ++j) targets[j].copy_(sources[j]);
  }
}

c10::Device Call::device() const {
  std::optional<c10::Device> found, named;
  for (const auto& value : arguments_) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!found && is_on_device(tensor)) found = tensor.device();
    });
    if (value.isDevice() && value.toDevice().type() == kDeviceType) named = value.toDevice();
  }
  return found ? *found : device_with(named ? named->index() : static_cast<c10::DeviceIndex>(-1));
}

std::optional<at::Generator> Call::take_generator() {
  for (auto& value : arguments_)
    if (value.isGenerator()) return std::exchange(value, c10::IValue()).toGenerator();
  return std::nullopt;
}

std::string Call::name() const {
  return schema_.name() + (schema_.overload_name().empty() ? "" : "." + schema_.overload_name());
}

bool Call::writes(size_t argument) const {
  const auto* alias = schema_.arguments()[argument].alias_info();
  return alias && alias->isWrite();
}

std::optional<size_t> Call::argument_returned_as(size_t result) const {
  const auto* returned = schema_.returns()[result].alias_info();
  if (!returned) return std::nullopt;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const auto* alias = schema_.arguments()[i].alias_info();
    if (alias && alias->beforeSets() == returned->beforeSets()) return i;
  }
  return std::nullopt;
}

bool Call::returns_new_tensors() const {
  for (size_t k = 0; k < schema_.returns().size(); ++k)
    if (!argument_returned_as(k)) return true;
  return false;
}

// A copy in place of a view would be silently wrong.
void Call::refuse_views() const {
  for (const auto& result : schema_.returns())
    TORCH_CHECK_NOT_IMPLEMENTED(
        !result.alias_info() || result.alias_info()->isWrite(), "the simulated device has no kernel for ", name());
}

// Kernels of a GPU take host tensors of one element by value, and indices, which are copied first; nothing else.
void Call::refuse_mixed_devices() const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    bool are_indices = arguments_[i].isOptionalTensorList();
    bool is_list = arguments_[i].isTensorList();
    for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK(
          tensor.device() == device() ||
              (!is_on_device(tensor) && (are_indices || (tensor.dim() == 0 && !is_list && !writes(i)))),
          "Expected all tensors to be on the same device, but found at least two devices, ",
          device(),
          " and ",
          tensor.device(),
          "! (",
          name(),
          ", argument ",
          schema_.arguments()[i].name(),
          ")");
    });
  }
}

bool Call::is_random() const {
  return op_.hasTag(at::Tag::nondeterministic_seeded);
}

bool Call::only_overwrites_self() const {
  if (!arguments_[0].isTensor() || !writes(0)) return false;
  for (size_t i = 1; i < arguments_.size(); ++i)
    if (arguments_[i].isTensor() || arguments_[i].isTensorList()) return false;
  return true;
}

std::vector<Range> Call::ranges(const std::vector<c10::IValue>& results) const {
  std::vector<Range> ranges;
  auto add = [&](const c10::IValue& value, bool write) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (is_on_device(tensor)) ranges.push_back(range_of(tensor, write));
    });
  };
  for (size_t i = 0; i < arguments_.size(); ++i) add(arguments_[i], writes(i));
  for (const auto& result : results) add(result, true);
  return ranges;
}

// Arguments for the CPU's kernel. What the host passes by value it passes now.
std::vector<c10::IValue> Call::host_arguments() const {
  BelowDispatch below;
  std::vector<c10::IValue> host;
  for (const auto& value : arguments_)
    host.push_back(map_tensors(with_device(value, at::kCPU), [](const at::Tensor& tensor) {
      return is_on_device(tensor) ? kernel_view(tensor) : tensor.clone();
    }));
  return host;
}

std::vector<c10::IValue> Call::meta_arguments() const {
  std::vector<c10::IValue> meta;
  for (const auto& value : arguments_)
    meta.push_back(map_tensors(with_device(value, at::kMeta), [](const at::Tensor& tensor) {
      return is_on_device(tensor) || tensor.dim() ? on_meta(tensor) : tensor;
    }));
  return meta;
}

std::optional<std::vector<c10::IValue>> Call::infer() {
  bool has_out = std::any_of(
      schema_.arguments().begin(), schema_.arguments().end(), [](const auto& argument) { return argument.is_out(); });
  if (!returns_new_tensors() && !has_out) return std::vector<c10::IValue>();
  BelowDispatch below;
  auto meta = meta_arguments();
  Stack stack = meta;
  try {
    op_.callBoxed(stack);
  } catch (const std::exception&) { // no kernel for meta tensors, or none without data
    return std::nullopt;
  }
  if (has_out) resize_outputs(meta);
  std::vector<c10::IValue> results;
  for (size_t k = 0; k < stack.size(); ++k) {
    if (auto argument = argument_returned_as(k)) {
      results.push_back(c10::IValue());
    } else if (stack[k].isTensor() || stack[k].isTensorList()) {
      results.push_back(map_tensors(stack[k], [&](const at::Tensor& each) { return on_device(each, device()); }));
    } else {
      return std::nullopt;
    }
  }
  return results;
}

void Call::resize_outputs(const std::vector<c10::IValue>& meta) {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!writes(i) || !arguments_[i].isTensor()) continue;
    const auto& tensor = arguments_[i].toTensor();
    if (tensor.sizes() != meta[i].toTensor().sizes()) tensor.resize_(meta[i].toTensor().sizes());
  }
}

void Call::run_later(std::vector<c10::IValue> results, Stack& stack) {
  std::vector<c10::IValue> targets;
  for (const auto& result : results) targets.push_back(map_tensors(result, kernel_view));
  queue(name(), ranges(results), [op = op_, arguments = host_arguments(), targets = std::move(targets)] {
    BelowDispatch below;
    Stack host = arguments;
    op.callBoxed(host);
    copy_results(targets, host);
  });
  for (size_t k = 0; k < schema_.returns().size(); ++k) {
    auto argument = argument_returned_as(k);
    stack.push_back(argument ? arguments_[*argument] : results[k]);
  }
}

void Call::run_now(Stack& stack) {
  statistics().waits[name()]++;
  auto host = std::make_shared<Stack>(host_arguments());
  Point done = queue(name(), ranges({}), [op = op_, host] {
    BelowDispatch below;
    op.callBoxed(*host);
  });
  if (op_.hasTag(at::Tag::dynamic_output_shape)) host_wait_read(done.stream); // as every device does
  else scheduler().reach(done); // not in the trace: only this device waits here
  for (size_t k = 0; k < schema_.returns().size(); ++k) {
    auto argument = argument_returned_as(k);
    auto on_the_device = [this](const at::Tensor& tensor) {
      at::Tensor result = on_device(tensor, device());
      if (tensor.numel()) result.copy_(tensor);
      return result;
    };
    BelowDispatch below;
    stack.push_back(argument ? arguments_[*argument] : map_tensors((*host)[k], on_the_device));
  }
}

// Random numbers are drawn when the host issues the operator, as on a GPU: no schedule changes them.
void Call::draw_now(Stack& stack) {
  BelowDispatch below;
  const auto& self = arguments_[0].toTensor();
  at::Tensor drawn = at::empty_strided(self.sizes(), self.strides(), self.options().device(at::kCPU));
  Stack host = arguments_;
  host[0] = drawn;
  op_.callBoxed(host);
  queue(name(), ranges({}), [to = kernel_view(self), drawn] {
    BelowDispatch below;
    to.copy_(drawn);
  });
  stack.push_back(self);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Lock lock;
  statistics().operators++;
  Call call(op, *stack);
  call.refuse_views();
  call.refuse_mixed_devices();
  OnDevice scope(call.device());
  if (call.is_random()) {
    LentState lent(call.take_generator(), call.device().index());
    return call.only_overwrites_self() ? call.draw_now(*stack) : call.run_now(*stack);
  }
  auto results = call.infer();
  results ? call.run_later(std::move(*results), *stack) : call.run_now(*stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Operators that torch would decompose for a device without a kernel, with other rounding than the CPU's kernel.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"silu_backward", "mish_backward", "native_channel_shuffle"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Operators that torch would call as their variants with `out`. Sessions with other kernels replace the ones without
// (`conformance/numerics/other_kernels.py`), in all processes: the device must not go on with torch's own.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name :
       {"mm",
        "bmm",
        "addmm",
        "sum.dim_IntList",
        "mean.dim",
        "linalg_vector_norm",
        "_softmax",
        "_log_softmax",
        "nll_loss_forward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

} // namespace

} // namespace sim
