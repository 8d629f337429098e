#include "inferred.h"

#include <ATen/Context.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "views.h"

namespace sim {

namespace {

// A program whose shapes change at every step would otherwise fill the host's memory.
constexpr size_t kMostCalls = 1 << 14;

std::unordered_map<std::string, Inferred>& calls() {
  static auto& instance = *new std::unordered_map<std::string, Inferred>; // outlives all threads of the process
  return instance;
}

class Key {
 public:
  explicit Key(const c10::OperatorHandle& op) : is_elementwise_(is_elementwise(op)) {
    add(op.schema().name());
    add(op.schema().overload_name());
    auto& context = at::globalContext();
    add(c10::get_default_dtype_as_scalartype());
    add(context.deterministicAlgorithms());
    add(context.userEnabledMkldnn());
  }

  // False for a value of a kind that has no place in a key.
  bool add_value(const c10::IValue& value) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isNone() || value.isGenerator()) return add('0');
    if (value.isBool()) return add('b') && add(value.toBool());
    if (value.isInt()) return add('i') && add(value.toInt());
    if (value.isDouble()) return add('d') && (is_elementwise_ || add(value.toDouble()));
    if (value.isComplexDouble()) return add('c') && add(value.toComplexDouble());
    if (value.isString()) return add('s') && add(value.toStringRef());
    if (value.isDevice()) return add('v') && add(value.toDevice().type()) && add(value.toDevice().index());
    if (!value.isList()) return false;
    auto elements = value.toListRef();
    add('l') && add(elements.size());
    return std::all_of(elements.begin(), elements.end(), [&](const auto& element) { return add_value(element); });
  }

  std::string bytes() && {
    return std::move(bytes_);
  }

 private:
  // Then layouts depend on no floating-point number: optimizers have others at each step.
  static bool is_elementwise(const c10::OperatorHandle& op) {
    return op.hasTag(at::Tag::pointwise) || op.schema().name().rfind("aten::_foreach_", 0) == 0;
  }

  template <typename T, typename = std::enable_if_t<std::is_trivially_copyable_v<T>>>
  bool add(const T& number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof number);
    return true;
  }

  bool add(const std::string& text) {
    add(text.size());
    bytes_ += text;
    return true;
  }

  bool add(c10::IntArrayRef numbers) {
    add(numbers.size());
    for (int64_t number : numbers) add(number);
    return true;
  }

  bool add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) return add('u');
    if (!tensor.has_storage() || tensor.layout() != at::kStrided || tensor._is_zerotensor()) return false;
    add(tensor.scalar_type());
    add(tensor.is_conj());
    add(tensor.is_neg());
    add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return is_on_device(tensor) || tensor.dim() ? add_layout(tensor) : add_number(tensor);
  }

  bool add_layout(const at::Tensor& tensor) {
    add('t');
    add(number_of(tensor.unsafeGetTensorImpl()));
    add(number_of(tensor.storage().unsafeGetStorageImpl()));
    add(tensor.storage().nbytes());
    add(tensor.storage_offset());
    return add(tensor.sizes()) && add(tensor.strides());
  }

  // Kernels for meta tensors see the numbers of the host.
  bool add_number(const at::Tensor& tensor) {
    if (!tensor.is_cpu()) return false;
    add('n');
    if (is_elementwise_ && tensor.is_floating_point()) return true;
    bytes_.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.itemsize());
    return true;
  }

  // Number of a tensor or a storage among those of the call: operators may tell operands that share memory from others.
  size_t number_of(const void* object) {
    auto found = std::find(objects_.begin(), objects_.end(), object);
    if (found == objects_.end()) found = objects_.insert(found, object);
    return found - objects_.begin();
  }

  bool is_elementwise_;
  std::string bytes_;
  std::vector<const void*> objects_;
};

} // namespace

std::optional<std::string> call_key(const c10::OperatorHandle& op, const Values& arguments) {
  if (op.schema().name().rfind("aten::", 0) != 0) return std::nullopt;
  Key key(op);
  for (const auto& argument : arguments)
    if (!key.add_value(argument)) return std::nullopt;
  return std::move(key).bytes();
}

const Inferred* remembered(const std::string& call) {
  auto found = calls().find(call);
  return found == calls().end() ? nullptr : &found->second;
}

void remember(std::string call, Inferred inferred) {
  if (calls().size() >= kMostCalls) calls().clear();
  calls().emplace(std::move(call), std::move(inferred));
}

} // namespace sim
