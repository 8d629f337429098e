// RMSNorm in one operator, as on CUDA; its numbers are those of the CPU's operators, see
// conformance/numerics/device_operators.py.
#include <ATen/AccumulateType.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/_fused_rms_norm_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "kernels.h"
#include "norms.h"

namespace sim {

namespace {

std::tuple<at::Tensor, at::Tensor> fused_rms_norm(
    const at::Tensor& input,
    at::IntArrayRef shape,
    const std::optional<at::Tensor>& weight,
    std::optional<double> eps) {
  auto of_rows = input.sizes().vec();
  std::fill(of_rows.end() - shape.size(), of_rows.end(), 1);
  at::Tensor out = at::empty_like(input, at::MemoryFormat::Contiguous);
  at::Tensor rstd = at::empty(of_rows, input.options().dtype(at::toAccumulateType(input.scalar_type(), true)));
  auto kernel = [shape = shape.vec(), eps](auto& from, auto& to) {
    auto [normalised, roots] = at::_fused_rms_norm(from[0], shape, from[1], eps);
    to[0].copy_(normalised);
    to[1].copy_(roots);
  };
  launch("aten::_fused_rms_norm", {input, weight.value_or(at::Tensor())}, {out, rstd}, kernel);
  return {out, rstd};
}

std::tuple<at::Tensor, at::Tensor> fused_rms_norm_backward(
    const at::Tensor& grad,
    const at::Tensor& input,
    at::IntArrayRef shape,
    const at::Tensor& rstd,
    const std::optional<at::Tensor>& weight,
    std::array<bool, 2> wanted) {
  at::Tensor of_input, of_weight;
  if (wanted[0]) of_input = at::empty_like(input, at::MemoryFormat::Contiguous);
  if (wanted[1] && weight) of_weight = at::empty_like(*weight, at::MemoryFormat::Contiguous);
  auto kernel = [shape = shape.vec(), wanted](auto& from, auto& to) {
    auto [for_input, for_weight] =
        at::_fused_rms_norm_backward(from[0], from[1], shape, from[2], from[3], wanted);
    if (to[0].defined()) to[0].copy_(for_input);
    if (to[1].defined()) to[1].copy_(for_weight);
  };
  Tensors from{grad, input, rstd, weight.value_or(at::Tensor())};
  launch("aten::_fused_rms_norm_backward", from, {of_input, of_weight}, kernel);
  return {of_input, of_weight};
}

} // namespace

void fuse_norms() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("_fused_rms_norm", fused_rms_norm);
  library.impl("_fused_rms_norm_backward", fused_rms_norm_backward);
}

} // namespace sim
