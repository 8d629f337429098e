// Every operator that has no kernel of its own: the CPU's kernel, queued on the current stream.
//
// The operator is called on meta tensors for the shapes of its results, and for the errors that the host can know; the
// results are allocated at once, and the kernel runs when the schedule wants. Results that cannot be known beforehand
// make the host wait, as on a GPU (`nonzero`). Views are made at once by the CPU's kernels, which touch no memory.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "device.h"
#include "fallback.h"
#include "generator.h"
#include "lock.h"
#include "other_on_meta.h"
#include "statistics.h"
#include "views.h"

namespace sim {

namespace {

using Stack = torch::jit::Stack;

using Values = std::vector<c10::IValue>;

// Keeps the warnings of its scope to itself.
class Silence final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

// One call of an operator.
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
  void try_out(Values arguments);
  bool resizes_in_place() const;
  bool lays_out_outputs() const;
  bool is_power_of_bools() const;
  bool may_lose_strides() const;
  void restride_as_in_float();
  void lay_out_arguments(const Values& others) const;
  void mark_arguments(const Values& others) const;
  std::vector<std::pair<at::Tensor, at::Tensor>> moved_arguments(const Values& twins) const;
  at::Tensor on_device(const at::Tensor& tensor) const;

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Values arguments_;
  c10::Device device_;
  // Arguments in place of the operator's own, as it has left them, and its results.
  Values tried_arguments_;
  Stack tried_results_;
};

c10::IValue with_device(const c10::IValue& value, c10::DeviceType type) {
  return value.isDevice() && value.toDevice().type() == kDeviceType ? c10::IValue(c10::Device(type)) : value;
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

at::Tensor empty_on(c10::Device device, const at::Tensor& like) {
  at::Tensor empty = at::empty_strided(like.sizes(), like.strides(), like.options().device(device).pinned_memory(false));
  if (like.is_conj()) empty._set_conj(true);
  if (like.is_neg()) empty._set_neg(true);
  return empty;
}

void copy_results(const std::vector<c10::IValue>& to, const Stack& from) {
  for (size_t k = 0; k < to.size(); ++k) {
    auto targets = tensors_in(to[k]), sources = tensors_in(from[k]);
    for (size_t j = 0; j < targets.size(); ++j) targets[j].copy_(sources[j]);
  }
}

Call::Call(const c10::OperatorHandle& op, Stack& stack)
    : op_(op),
      schema_(op.schema()),
      arguments_(torch::jit::pop(stack, schema_.arguments().size())),
      device_(device_with(-1)) {
  std::optional<c10::Device> found, named;
  for (const auto& value : arguments_) {
    for (const auto& tensor : tensors_in(value))
      if (!found && is_on_device(tensor)) found = tensor.device();
    if (value.isDevice() && value.toDevice().type() == kDeviceType) named = value.toDevice();
  }
  if (found) device_ = *found;
  else if (named) device_ = device_with(named->index());
}

bool Call::seed() {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (schema_.arguments()[i].name() != "generator") continue;
    auto seeded = seeded_generator(arguments_[i].toOptional<at::Generator>(), device().index());
    if (seeded) arguments_[i] = *seeded;
    return seeded.has_value();
  }
  return true; // attention on the CPU, which has no dropout
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

bool Call::has_out() const {
  return std::any_of(
      schema_.arguments().begin(), schema_.arguments().end(), [](const auto& argument) { return argument.is_out(); });
}

// An output that the operator reads, too, as variants in place call those with `out`.
bool Call::is_input(const c10::IValue& output) const {
  for (size_t i = 0; i < arguments_.size(); ++i)
    if (!schema_.arguments()[i].is_out() && output.isTensor() && arguments_[i].isTensor() &&
        arguments_[i].toTensor().is_same(output.toTensor()))
      return true;
  return false;
}

// Then no kernel may resize it: on the CPU it would see one tensor, and complain.
bool Call::overwrites_input() const {
  for (size_t i = 0; i < arguments_.size(); ++i)
    if (schema_.arguments()[i].is_out() && is_input(arguments_[i])) return true;
  return false;
}

void refuse_other_layout(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == at::kStrided && !tensor.is_quantized(),
      "the simulated device has strided tensors only: ",
      name,
      " has one with layout ",
      tensor.layout(),
      " and dtype ",
      tensor.scalar_type());
}

void Call::refuse_other_layouts() const {
  for (const auto& value : arguments_)
    for_each_tensor(value, [&](const at::Tensor& tensor) { refuse_other_layout(name(), tensor); });
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

std::vector<Range> Call::ranges(const Values& results) const {
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

at::Tensor Call::on_device(const at::Tensor& tensor) const {
  refuse_other_layout(name(), tensor);
  return empty_on(device_, tensor);
}

at::Tensor passed_by_value(const at::Tensor& number) {
  at::Tensor copy = number.clone();
  if (number.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// Arguments for the CPU's kernel. What the host passes by value it passes now.
Values Call::host_arguments(Twins twins) const {
  BelowDispatch below;
  Values host;
  for (const auto& value : arguments_)
    host.push_back(map_tensors(with_device(value, at::kCPU), [&](const at::Tensor& tensor) {
      return is_on_device(tensor) ? twins.twin(tensor) : passed_by_value(tensor);
    }));
  return host;
}

Values Call::meta_arguments() const {
  Twins twins(at::kMeta);
  Values meta;
  for (const auto& value : arguments_)
    meta.push_back(map_tensors(with_device(value, at::kMeta), [&](const at::Tensor& tensor) {
      return is_on_device(tensor) || tensor.dim() ? twins.twin(tensor) : tensor;
    }));
  return meta;
}

// Torch's kernel for meta tensors has int64 for a power of bools, others the dtype of both operands.
bool Call::is_power_of_bools() const {
  const auto& base = arguments_[0];
  return schema_.name() == "aten::pow" && base.isTensor() && base.toTensor().scalar_type() == at::kBool;
}

// The same with zeros, for a trial on the CPU.
Values Call::zero_arguments() const {
  Values zeros;
  for (const auto& value : arguments_)
    zeros.push_back(map_tensors(with_device(value, at::kCPU), [&](const at::Tensor& tensor) {
      return is_on_device(tensor) || tensor.dim() ? empty_on(at::kCPU, tensor).zero_() : passed_by_value(tensor);
    }));
  return zeros;
}

bool is_of_16_bits(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// The same on meta, with float32 in place of dtypes of 16 bits.
Values Call::float_arguments() const {
  Values meta;
  for (const auto& value : arguments_)
    meta.push_back(map_tensors(with_device(value, at::kMeta), [](const at::Tensor& tensor) {
      auto dtype = is_of_16_bits(tensor) ? at::kFloat : tensor.scalar_type();
      return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).dtype(dtype));
    }));
  return meta;
}

void Call::try_out(Values arguments) {
  tried_arguments_ = std::move(arguments);
  tried_results_ = tried_arguments_;
  op_.callBoxed(tried_results_);
}

std::optional<Values> Call::infer() {
  if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output)) return std::nullopt;
  BelowDispatch below;
  try {
    bool on_meta = !is_other_on_meta(schema_.name()) && !is_power_of_bools();
    try_out(on_meta ? meta_arguments() : zero_arguments());
    if (on_meta && lays_out_outputs()) {
      Silence once; // the host was warned of outputs with other sizes
      try_out(zero_arguments());
    }
    if (may_lose_strides()) restride_as_in_float();
  } catch (const c10::NotImplementedError&) { // no kernel for meta tensors
    tried_arguments_.clear();
    return returns_new_tensors() || has_out() ? std::nullopt : std::make_optional<Values>();
  } catch (const std::exception&) { // wrong arguments, about which the CPU's kernel complains, or a need for data
    return std::nullopt;
  }
  if (resizes_in_place()) return std::nullopt; // or the CPU's kernel complains
  Values results;
  for (size_t k = 0; k < tried_results_.size(); ++k) {
    const auto& result = tried_results_[k];
    if (argument_returned_as(k)) {
      results.push_back(c10::IValue());
    } else if (result.isTensor() || result.isTensorList()) {
      results.push_back(map_tensors(result, [&](const at::Tensor& tensor) { return on_device(tensor); }));
    } else {
      return std::nullopt;
    }
  }
  lay_out_arguments(tried_arguments_);
  return results;
}

// An output that is an input, too, counts: variants in place of composed operators pass their tensor as both.
bool Call::resizes_in_place() const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!writes(i) || (schema_.arguments()[i].is_out() && !is_input(arguments_[i]))) continue;
    auto tensors = tensors_in(arguments_[i]), resized = tensors_in(tried_arguments_[i]);
    for (size_t j = 0; j < tensors.size(); ++j)
      if (tensors[j].sizes() != resized[j].sizes()) return true;
  }
  return false;
}

// Torch's kernels for meta tensors give contiguous strides to outputs that they resize, those of the CPU do not always.
// Operators that draw random numbers have no others, and are not to be called once more.
bool Call::lays_out_outputs() const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (is_random() || !schema_.arguments()[i].is_out()) continue;
    auto tensors = tensors_in(arguments_[i]), resized = tensors_in(tried_arguments_[i]);
    for (size_t j = 0; j < tensors.size(); ++j)
      if (tensors[j].sizes() != resized[j].sizes() && resized[j].dim() > 1) return true;
  }
  return false;
}

// Torch's kernels for meta tensors convert operands of 16 bits first. One that is not dense loses its strides, on which
// those of the result may depend. The CPU's kernels convert operands of different dtypes only.
bool Call::may_lose_strides() const {
  if (!op_.hasTag(at::Tag::pointwise) || !returns_new_tensors()) return false;
  std::set<at::ScalarType> dtypes;
  bool are_dense = true;
  for (const auto& value : arguments_)
    for (const auto& tensor : tensors_in(value))
      if (tensor.dim()) {
        dtypes.insert(tensor.scalar_type());
        are_dense &= tensor.is_non_overlapping_and_dense();
      }
  return !are_dense && (dtypes == std::set{at::kHalf} || dtypes == std::set{at::kBFloat16});
}

void Call::restride_as_in_float() {
  Stack in_float = float_arguments();
  op_.callBoxed(in_float);
  for (size_t k = 0; k < in_float.size(); ++k)
    if (!argument_returned_as(k) && in_float[k].isTensor()) {
      auto options = tried_results_[k].toTensor().options();
      tried_results_[k] = at::empty_strided(in_float[k].toTensor().sizes(), in_float[k].toTensor().strides(), options);
    }
}

// Gives what is written the sizes and strides that the operator has given to others in its place.
void Call::lay_out_arguments(const Values& others) const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!writes(i)) continue;
    auto tensors = tensors_in(arguments_[i]), laid_out = tensors_in(others[i]);
    for (size_t j = 0; j < tensors.size(); ++j) {
      auto &tensor = tensors[j], &other = laid_out[j];
      if (tensor.sizes() != other.sizes() || tensor.strides() != other.strides())
        tensor.set_(tensor.storage(), tensor.storage_offset(), other.sizes(), other.strides());
    }
  }
}

// The same for bits of conjugation and negation, which kernels set when they have written the plain numbers.
void Call::mark_arguments(const Values& others) const {
  for (size_t i = 0; i < others.size(); ++i) {
    if (!writes(i)) continue;
    auto tensors = tensors_in(arguments_[i]), marked = tensors_in(others[i]);
    for (size_t j = 0; j < tensors.size(); ++j) {
      if (tensors[j].is_conj() != marked[j].is_conj()) tensors[j]._set_conj(marked[j].is_conj());
      if (tensors[j].is_neg() != marked[j].is_neg()) tensors[j]._set_neg(marked[j].is_neg());
    }
  }
}

// Pairs of what is written and its twin that the kernel has moved to other memory, as it needed more.
std::vector<std::pair<at::Tensor, at::Tensor>> Call::moved_arguments(const Values& twins) const {
  std::vector<std::pair<at::Tensor, at::Tensor>> moved;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!writes(i)) continue;
    auto tensors = tensors_in(arguments_[i]), others = tensors_in(twins[i]);
    for (size_t j = 0; j < tensors.size(); ++j)
      if (kernel_view(tensors[j]).storage().data() != others[j].storage().data())
        moved.emplace_back(tensors[j], others[j]);
  }
  return moved;
}

void Call::run_later(Values results, Stack& stack) {
  Values targets;
  for (const auto& result : results) targets.push_back(map_tensors(result, kernel_view));
  auto run = [op = op_, arguments = host_arguments(Twins(at::kCPU)), targets = std::move(targets)] {
    BelowDispatch below;
    Stack host = arguments;
    op.callBoxed(host);
    copy_results(targets, host);
  };
  queue(name(), ranges(results), std::move(run));
  mark_arguments(tried_arguments_);
  for (size_t k = 0; k < schema_.returns().size(); ++k) {
    auto argument = argument_returned_as(k);
    stack.push_back(argument ? arguments_[*argument] : results[k]);
  }
}

// The host waits for the results. An error is the kernel's own.
void Call::run_now(Stack& stack) {
  struct Run {
    Values arguments;
    Stack results;
    std::exception_ptr error;
  };
  statistics().waits[name()]++;
  BelowDispatch below;
  auto run = std::make_shared<Run>(); // an earlier task may fail, and leave this one in its queue
  run->arguments = host_arguments(Twins(at::kCPU, /*may_grow=*/!overwrites_input()));
  Point done = queue(name(), ranges({}), [op = op_, run] {
    BelowDispatch below;
    run->results = run->arguments;
    try {
      op.callBoxed(run->results);
    } catch (...) {
      run->error = std::current_exception();
    }
  });
  if (op_.hasTag(at::Tag::dynamic_output_shape)) host_wait_read(done.stream); // as every device does
  else scheduler().reach(done); // not in the trace: only this device waits here
  if (run->error) std::rethrow_exception(run->error);
  auto moved = moved_arguments(run->arguments);
  lay_out_arguments(run->arguments);
  mark_arguments(run->arguments);
  for (auto& [tensor, twin] : moved) tensor.copy_(twin);
  auto on_the_device = [&](const at::Tensor& tensor) {
    at::Tensor result = on_device(tensor);
    if (tensor.numel()) result.copy_(tensor);
    return result;
  };
  for (size_t k = 0; k < schema_.returns().size(); ++k) {
    auto argument = argument_returned_as(k);
    stack.push_back(argument ? arguments_[*argument] : map_tensors(run->results[k], on_the_device));
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

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Lock lock;
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
      "the simulated device has the CPU's kernels, and the CPU has none for ",
      op.schema().name());
  if (is_view(op.schema())) return op.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
  statistics().operators++;
  Call call(op, *stack);
  call.refuse_other_layouts();
  call.refuse_mixed_devices();
  OnDevice scope(call.device());
  if (call.is_random()) {
    bool is_seeded = call.seed();
    if (call.only_overwrites_self()) return call.draw_now(*stack);
    if (!is_seeded) return call.run_now(*stack);
  }
  auto results = call.infer();
  results ? call.run_later(std::move(*results), *stack) : call.run_now(*stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Operators that choose a kernel by the device themselves, and have none for this kind.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"convolution", "_convolution", "convolution_backward", "conj_physical_", "mode.values"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

} // namespace

void follow_cpu() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    auto op = dispatcher.findOp(name);
    if (name.getNamespace() != "aten" || !op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue; // reaches the fallback anyhow
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

} // namespace sim
