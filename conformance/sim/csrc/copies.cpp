// Copies within the device, and between host and device: the host goes on as far as CUDA lets it.
// https://docs.nvidia.com/cuda/cuda-driver-api/api-sync-behavior.html
//
// - pinned memory, non_blocking: neither side waits;
// - pinned memory otherwise: the host waits until the copy is done;
// - pageable to device: the bytes are read at once (staged) and written in the order of the stream;
// - device to pageable: the host waits.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <torch/library.h>

#include <memory>

#include "device.h"
#include "lock.h"
#include "pinned.h"
#include "statistics.h"
#include "views.h"

namespace sim {

namespace {

bool is_pinned(const at::Tensor& host) {
  return pinned_memory().contains(host.storage().data());
}

std::function<void()> copying(at::Tensor to, at::Tensor from) {
  return [to = std::move(to), from = std::move(from)] {
    BelowDispatch below;
    to.copy_(from);
  };
}

void to_device(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (!is_pinned(from)) {
    at::Tensor staged;
    {
      BelowDispatch below;
      staged = from.detach().clone();
    }
    queue("copy_pageable_to_device", {range_of(to, true)}, copying(kernel_view(to), staged));
    return;
  }
  Point done = queue(
      "copy_pinned_to_device",
      {range_of(from, false), range_of(to, true)},
      copying(kernel_view(to), kernel_view(from)));
  pinned_memory().use(from.storage().data(), done);
  if (!non_blocking) host_wait_stream(done.stream);
}

void to_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  bool pinned = is_pinned(to);
  std::vector<Range> ranges{range_of(from, false)};
  if (pinned) ranges.push_back(range_of(to, true));
  // Pageable memory stays until the copy has run, even if an earlier task fails and the host stops to wait.
  auto run = [copy = copying(kernel_view(to), kernel_view(from)), kept = pinned ? at::Tensor() : to] { copy(); };
  Point done = queue(pinned ? "copy_device_to_pinned" : "copy_device_to_pageable", std::move(ranges), std::move(run));
  if (pinned) pinned_memory().use(to.storage().data(), done);
  if (!pinned) host_wait_read(done.stream);
  else if (!non_blocking) host_wait_stream(done.stream);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  Lock lock;
  if (!to.numel()) return to;
  at::Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (!is_on_device(to)) {
    to_host(to, source, non_blocking);
  } else if (is_on_device(source)) {
    queue(
        "copy_within_device",
        {range_of(source, false), range_of(to, true)},
        copying(kernel_view(to), kernel_view(source)));
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
