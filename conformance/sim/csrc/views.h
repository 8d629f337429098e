// Tensors as kernels see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <utility>
#include <vector>

#include "trace.h"

namespace sim {

// Switches off all that lies above kernels (autograd, autocast, Python modes), as kernels run whenever a schedule wants.
struct BelowDispatch {
  BelowDispatch();

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

bool is_on_device(const at::Tensor& tensor);

// Tensors for another device in place of given ones: on the CPU over the same bytes or over zeros, or on meta without
// any. Those over the same bytes own no memory, as nothing that a kernel or a copy engine uses. Twins share storages as
// the given tensors do, and are the same where those are, so that operators notice overlaps. An operator may resize those
// that may grow: they have memory of their own then.
class Twins {
 public:
  static Twins on_meta() {
    return Twins(c10::DeviceType::Meta, Bytes::none, true);
  }
  static Twins over_same_bytes(bool may_grow = false) {
    return Twins(c10::DeviceType::CPU, Bytes::same, may_grow);
  }
  static Twins over_zeros() {
    return Twins(c10::DeviceType::CPU, Bytes::zeros, true);
  }
  at::Tensor twin(const at::Tensor& tensor);

 private:
  enum class Bytes { none, same, zeros };

  Twins(c10::DeviceType type, Bytes bytes, bool may_grow) : type_(type), bytes_(bytes), may_grow_(may_grow) {}
  c10::DataPtr bytes(const c10::Storage& given) const;
  c10::Storage storage(const c10::Storage& given);

  c10::DeviceType type_;
  Bytes bytes_;
  bool may_grow_;
  std::vector<std::pair<const c10::StorageImpl*, c10::Storage>> storages_;
  std::vector<std::pair<const c10::TensorImpl*, at::Tensor>> twins_;
};

// CPU tensor over the bytes of a tensor on the device or the host.
at::Tensor kernel_view(const at::Tensor& tensor);

// Bytes that a strided tensor covers.
Range range_of(const at::Tensor& tensor, bool write);

// Applies a function to each defined tensor in a value: a tensor, or a list of (optional) tensors.
c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change);
void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& act);

} // namespace sim
