#include "call.h"

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "device.h"
#include "generator.h"

namespace sim {

namespace {

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

} // namespace

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

at::Tensor passed_by_value(const at::Tensor& number) {
  at::Tensor copy = number.clone();
  if (number.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
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

void Call::refuse_other_layouts() const {
  for (const auto& value : arguments_)
    for_each_tensor(value, [&](const at::Tensor& tensor) { refuse_other_layout(name(), tensor); });
}

// Kernels of a GPU take host tensors of one element by value, and indices, which are copied first; nothing else. Fused
// optimizers take a learning rate of one dimension, too: ATen/native/cuda/FusedAdamKernel.cu.
void Call::refuse_mixed_devices() const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    bool are_indices = arguments_[i].isOptionalTensorList();
    bool is_list = arguments_[i].isTensorList(), is_rate = schema_.arguments()[i].name() == "lr";
    for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
      TORCH_CHECK(
          tensor.device() == device() ||
              (!is_on_device(tensor) &&
               (are_indices || (is_rate && tensor.numel() == 1) || (tensor.dim() == 0 && !is_list && !writes(i)))),
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

} // namespace sim
