// Copies within the device, and between host and device: the host goes on as far as CUDA and torch let it.
// https://docs.nvidia.com/cuda/cuda-driver-api/api-sync-behavior.html and aten/src/ATen/native/cuda/Copy.cu
//
// - without non_blocking the host waits for the stream, whatever the memory;
// - pinned memory, non_blocking: neither side waits;
// - pageable to device, non_blocking: the bytes are read at once (staged) and written in the order of the stream;
// - device to pageable: the host waits.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <torch/library.h>

#include <memory>

#include "device.h"
#include "lock.h"
#include "page_guard.h"
#include "pinned.h"
#include "statistics.h"
#include "views.h"

namespace sim {

namespace {

bool is_pinned(const at::Tensor& host) {
  return pinned_memory().contains(host.storage().data());
}

// Notes what the host gets of the device.
void note_read(const at::Tensor& host) {
  if (!trace().is_on()) return;
  BelowDispatch below;
  at::Tensor dense = host.contiguous();
  trace().read(dense.const_data_ptr(), dense.nbytes());
}

std::function<void()> copying(at::Tensor to, at::Tensor from) {
  return [to = std::move(to), from = std::move(from)] {
    BelowDispatch below;
    to.copy_(from);
  };
}

// The same, while the host may not touch the pinned bytes; what it gets is noted.
std::function<void()> copying_pinned(at::Tensor to, at::Tensor from, Range pinned) {
  guard_pages(pinned);
  return [copy = copying(to, from), to, pinned] {
    OpenPages open(pinned);
    copy();
    if (pinned.write) note_read(to);
  };
}

Point from_pageable(const at::Tensor& to, const at::Tensor& from) {
  at::Tensor staged;
  {
    BelowDispatch below;
    staged = from.detach().clone();
  }
  return queue("copy_pageable_to_device", {range_of(to, true)}, copying(kernel_view(to), staged));
}

Point from_pinned(const at::Tensor& to, const at::Tensor& from) {
  Point done = queue(
      "copy_pinned_to_device",
      {range_of(from, false), range_of(to, true)},
      copying_pinned(kernel_view(to), kernel_view(from), range_of(from, false)));
  pinned_memory().use(from.storage().data(), done.stream);
  return done;
}

void to_device(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  bool pinned = is_pinned(from);
  Point done = pinned ? from_pinned(to, from) : from_pageable(to, from);
  if (non_blocking) return;
  pinned ? host_wait_stream(done.stream) : host_wait_read(done.stream);
}

void to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (!is_pinned(to)) {
    // Pageable memory stays until the copy has run, even if an earlier task fails and the host waits no longer.
    auto copy = [copy = copying(kernel_view(to), kernel_view(from)), kept = to, to = kernel_view(to)] {
      copy();
      note_read(to);
    };
    host_wait_read(queue("copy_device_to_pageable", {range_of(from, false)}, std::move(copy)).stream);
    return;
  }
  Point done = queue(
      "copy_device_to_pinned",
      {range_of(from, false), range_of(to, true)},
      copying_pinned(kernel_view(to), kernel_view(from), range_of(to, true)));
  pinned_memory().use(to.storage().data(), done.stream);
  if (!non_blocking) host_wait_stream(done.stream);
}

// Between two devices the copy runs on the source's stream, and the other device's stream waits for it.
// https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/Copy.cu
void within_devices(const at::Tensor& to, const at::Tensor& from) {
  int64_t source = current_stream(from.device().index()), target = current_stream(to.device().index());
  if (source != target) wait_for(source, target);
  queue(
      "copy_within_device", {range_of(from, false), range_of(to, true)}, copying(kernel_view(to), kernel_view(from)));
  if (source != target) wait_for(target, source);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Lock lock;
  if (!to.numel()) return to;
  at::Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  at::assert_no_internal_overlap(to);
  at::assert_no_partial_overlap(to, source);
  if (!is_on_device(to)) {
    to_host(to, source, non_blocking);
  } else if (is_on_device(source)) {
    within_devices(to, source);
  } else {
    to_device(to, source, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// `item()`: the host waits for the stream, and reads.
at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  Lock lock;
  auto value = std::make_shared<at::Scalar>(); // an earlier task may fail, and leave this one in its queue
  Point done = queue("item", {range_of(tensor, false)}, [value, view = kernel_view(tensor)] {
    BelowDispatch below;
    *value = at::_local_scalar_dense(view);
    note_read(view);
  });
  statistics().waits["item"]++;
  host_wait_read(done.stream);
  return *value;
}

// Copies resolve conjugation and negation themselves.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
}

} // namespace

} // namespace sim
