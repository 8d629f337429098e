#include "views.h"

#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "memory_map.h"

namespace sim {

BelowDispatch::BelowDispatch()
    : guard_(
          c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet(
              {c10::DispatchKey::Python,
               c10::DispatchKey::PythonTLSSnapshot,
               c10::DispatchKey::PythonDispatcher,
               c10::DispatchKey::Functionalize})) {}

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

at::Tensor kernel_view(const at::Tensor& tensor) {
  BelowDispatch below;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto* data = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  char* begin = (is_on_device(tensor) ? kernel_address(data) : data) + tensor.storage_offset() * tensor.itemsize();
  at::Tensor view = at::from_blob(begin, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) view = at::_conj(view);
  return tensor.is_neg() ? at::_neg_view(view) : view;
}

Range range_of(const at::Tensor& tensor, bool write) {
  auto begin = reinterpret_cast<uint64_t>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  if (!tensor.numel()) return {begin, begin, write};
  uint64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {begin, begin + elements * tensor.itemsize(), write};
}

c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  auto changed = [&](const at::Tensor& tensor) { return tensor.defined() ? change(tensor) : tensor; };
  if (value.isTensor()) return changed(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(changed(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(changed(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& act) {
  auto visit = [&](const at::Tensor& tensor) {
    if (tensor.defined()) act(tensor);
  };
  if (value.isTensor()) visit(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  if (value.isOptionalTensorList())
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor) visit(*tensor);
}

} // namespace sim
