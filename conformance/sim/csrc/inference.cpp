// Layouts of an operator's results, from a call of the operator on meta tensors.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <set>

#include "call.h"
#include "other_on_meta.h"
#include "statistics.h"

namespace sim {

namespace {

// Keeps the warnings of its scope to itself.
class Silence final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

// Passes the warnings of its scope on, and knows whether there were any.
class Listener final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    has_heard_ = true;
    next_->process(warning);
  }
  bool has_heard() const {
    return has_heard_;
  }

 private:
  bool has_heard_ = false;
  c10::WarningHandler* next_ = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

// Such as KeyboardInterrupt, which is the program's, no error of the kernel.
bool is_interruption(const pybind11::error_already_set& error) {
  pybind11::gil_scoped_acquire python;
  return !error.matches(PyExc_Exception);
}

bool have_same_layout(const at::Tensor& one, const at::Tensor& other) {
  return one.sizes() == other.sizes() && one.strides() == other.strides() && one.is_conj() == other.is_conj() &&
      one.is_neg() == other.is_neg();
}

bool shares_elements(const at::Tensor& one, const at::Tensor& other) {
  auto status = at::get_overlap_status(one, other);
  return status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial;
}

bool is_of_16_bits(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

} // namespace

Values Call::meta_arguments() const {
  Twins twins = Twins::on_meta();
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
  Twins twins = Twins::over_zeros();
  Values zeros;
  for (const auto& value : arguments_)
    zeros.push_back(map_tensors(with_device(value, at::kCPU), [&](const at::Tensor& tensor) {
      return is_on_device(tensor) || tensor.dim() ? twins.twin(tensor) : passed_by_value(tensor);
    }));
  return zeros;
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
  auto call = call_key(op_, arguments_);
  if (const auto* known = call ? remembered(*call) : nullptr) return on_device(*known);
  Listener listener;
  Inferred inferred = infer_on_meta();
  auto results = on_device(inferred);
  if (call && !listener.has_heard() && leaves_arguments_as_they_are()) remember(std::move(*call), std::move(inferred));
  if (results) lay_out_arguments(tried_arguments_);
  return results;
}

Inferred Call::infer_on_meta() {
  statistics().inferences++;
  try {
    bool on_meta = !is_other_on_meta(schema_.name()) && !is_power_of_bools();
    try_out(on_meta ? meta_arguments() : zero_arguments());
    if (on_meta && !is_random() && (lays_out_outputs() || overlaps_what_it_writes())) {
      Silence once; // the host was warned of outputs with other sizes, or will be by the kernel
      try_out(zero_arguments());
    }
    if (may_lose_strides()) restride_as_in_float();
  } catch (const c10::NotImplementedError&) { // no kernel for meta tensors
    tried_arguments_.clear();
    return returns_new_tensors() || has_out() ? std::nullopt : std::make_optional<Values>();
  } catch (const pybind11::error_already_set& error) { // the same of a kernel that is Python
    tried_arguments_.clear();
    if (is_interruption(error)) throw;
    return std::nullopt;
  } catch (const std::exception&) { // wrong arguments, about which the CPU's kernel complains, or a need for data
    tried_arguments_.clear();
    return std::nullopt;
  }
  if (resizes_in_place()) return std::nullopt; // or the CPU's kernel complains
  Values results;
  for (size_t k = 0; k < tried_results_.size(); ++k) {
    const auto& result = tried_results_[k];
    if (argument_returned_as(k)) {
      results.push_back(c10::IValue());
    } else if (result.isTensor() || result.isTensorList()) {
      results.push_back(map_tensors(result, [&](const at::Tensor& tensor) { return empty_on(at::kMeta, tensor); }));
    } else {
      return std::nullopt;
    }
  }
  return results;
}

std::optional<Values> Call::on_device(const Inferred& inferred) const {
  if (!inferred) return std::nullopt;
  Values results;
  for (const auto& result : *inferred)
    results.push_back(map_tensors(result, [&](const at::Tensor& tensor) { return on_device(tensor); }));
  return results;
}

// False where the operator resizes or marks what it writes, which each call has to do.
bool Call::leaves_arguments_as_they_are() const {
  for (size_t i = 0; i < tried_arguments_.size(); ++i) {
    if (!writes(i)) continue;
    auto tensors = tensors_in(arguments_[i]), tried = tensors_in(tried_arguments_[i]);
    for (size_t j = 0; j < tensors.size(); ++j)
      if (!have_same_layout(tensors[j], tried[j])) return false;
  }
  return true;
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
bool Call::lays_out_outputs() const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!schema_.arguments()[i].is_out()) continue;
    auto tensors = tensors_in(arguments_[i]), resized = tensors_in(tried_arguments_[i]);
    for (size_t j = 0; j < tensors.size(); ++j)
      if (tensors[j].sizes() != resized[j].sizes() && resized[j].dim() > 1) return true;
  }
  return false;
}

// Operands on meta have no addresses, by which kernels notice this.
bool Call::overlaps_what_it_writes() const {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!writes(i)) continue;
    for (const auto& written : tensors_in(arguments_[i])) {
      if (at::has_internal_overlap(written) == at::MemOverlap::Yes) return true;
      for (size_t j = 0; j < arguments_.size(); ++j)
        for (const auto& other : tensors_in(arguments_[j]))
          if (i != j && shares_elements(written, other)) return true;
    }
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

} // namespace sim
