// Operators on tensors rather than on their elements: allocation, sizes, and storage.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
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

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
    size_t bytes = impl->numel() ? (impl->numel() + impl->storage_offset()) * impl->itemsize() : 0;
    if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
  if (format) {
    TORCH_CHECK(*format != at::MemoryFormat::Preserve, "Unsupported memory format", *format);
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage_and_view(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(storage), offset, sizes, strides);
  auto* impl = self.unsafeGetTensorImpl();
  auto contiguous = c10::contiguous_strides(sizes);
  impl->set_sizes_and_strides(sizes, strides.empty() ? at::IntArrayRef(contiguous) : strides, offset);
  size_t bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset);
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_and_view(self, std::move(storage), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_and_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_storage_and_view(self, at::empty({0}, self.options()).storage(), 0, {0}, {});
}

// Both are strided: then one may take the other's place, on whichever device.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  allocators().recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("set_", set_nothing);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_and_view);
  library.impl("record_stream", record_stream);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

} // namespace

} // namespace sim
