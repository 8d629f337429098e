// Operators on tensors rather than on their elements: allocation, views, and storage.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include "allocator.h"
#include "device.h"
#include "lock.h"

namespace sim {

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

CachingAllocator& allocator_of(std::optional<at::Device> device) {
  return allocator(device_with(device ? device->index() : static_cast<c10::DeviceIndex>(-1)).index());
}

at::Tensor empty_memory_format(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator_of(device), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator_of(device), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor strided_view(
    const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<at::TensorImpl>(
      at::TensorImpl::VIEW, at::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.value_or(self.storage_offset()));
  return view;
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return strided_view(self, sizes, strides, self.storage_offset());
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef wanted) {
  auto sizes = at::infer_size_dv(wanted, self.numel());
  auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(
      strides,
      "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
      "contiguous subspaces). Use .reshape(...) instead.");
  return strided_view(self, sizes, *strides, self.storage_offset());
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  TORCH_CHECK(self.dim() && size <= self.size(dim) && step > 0, "unfold of a window that does not fit");
  auto sizes = self.sizes().vec(), strides = self.strides().vec();
  dim = dim < 0 ? dim + self.dim() : dim;
  sizes.push_back(size);
  strides.push_back(strides[dim]);
  sizes[dim] = (self.size(dim) - size) / step + 1;
  strides[dim] *= step;
  return strided_view(self, sizes, strides, self.storage_offset());
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t bytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage_and_view(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_and_strides(sizes, c10::contiguous_strides(sizes), offset);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_and_view(self, std::move(storage), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_and_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& self, at::Stream stream) {
  allocators().recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", strided_view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("unfold", unfold);
  library.impl("resize_", resize_);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_and_view);
  library.impl("record_stream", record_stream);
}

} // namespace

} // namespace sim
