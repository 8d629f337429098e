#include "views.h"

#include <cstring>

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

c10::DataPtr Twins::bytes(const c10::Storage& given) const {
  if (bytes_ == Bytes::none) return c10::DataPtr(nullptr, c10::Device(type_));
  if (bytes_ == Bytes::zeros) {
    c10::DataPtr zeros = c10::GetAllocator(type_)->allocate(given.nbytes());
    std::memset(zeros.get(), 0, given.nbytes());
    return zeros;
  }
  void* data = const_cast<void*>(given.data());
  bool is_on_device = given.device_type() == c10::DeviceType::PrivateUse1;
  return c10::DataPtr(is_on_device ? kernel_address(data) : data, c10::Device(type_));
}

c10::Storage Twins::storage(const c10::Storage& given) {
  for (const auto& [known, twin] : storages_)
    if (known == given.unsafeGetStorageImpl()) return twin;
  auto* allocator = may_grow_ ? c10::GetAllocator(type_) : nullptr;
  c10::Storage twin(c10::Storage::use_byte_size_t(), given.nbytes(), bytes(given), allocator, allocator != nullptr);
  storages_.emplace_back(given.unsafeGetStorageImpl(), twin);
  return twin;
}

at::Tensor Twins::twin(const at::Tensor& tensor) {
  for (const auto& [known, twin] : twins_)
    if (known == tensor.unsafeGetTensorImpl()) return twin;
  auto key = type_ == at::kMeta ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
  at::Tensor twin =
      at::detail::make_tensor<at::TensorImpl>(storage(tensor.storage()), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = twin.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  twins_.emplace_back(tensor.unsafeGetTensorImpl(), twin);
  return twin;
}

at::Tensor kernel_view(const at::Tensor& tensor) {
  return Twins::over_same_bytes().twin(tensor);
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
