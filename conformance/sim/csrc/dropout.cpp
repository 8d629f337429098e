// Dropout as CUDA's kernels compute it: a mask of bool, and products in the accumulation type, rounded once.
// https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/Dropout.cu
#include <ATen/AccumulateType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "generator.h"
#include "kernels.h"
#include "views.h"

namespace sim {

namespace {

// Reciprocal of the share that is kept, itself a number of the accumulation type.
double dropout_scale(double kept, at::ScalarType dtype) {
  return dtype == at::kDouble ? 1.0 / kept : static_cast<float>(1.0 / static_cast<float>(kept));
}

// Random numbers are the CPU's, drawn when the host issues the operator: no schedule changes them, nobody waits.
at::Tensor drawn_mask(const at::Tensor& self, double kept) {
  BelowDispatch below;
  return at::empty(self.sizes(), at::kBool).bernoulli_(kept, seeded_generator(std::nullopt, self.device().index()));
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& self, double p, std::optional<bool> train) {
  auto of_bool = self.options().dtype(at::kBool);
  if (train && !*train) return {self.clone(), at::ones_like(self, of_bool)};
  if (p == 1.0) return {at::zeros_like(self), at::zeros_like(self, of_bool)};
  at::Tensor out = at::empty_like(self), mask = at::empty_like(self, of_bool);
  auto type = at::toAccumulateType(self.scalar_type(), /*is_cuda=*/true);
  double scale = dropout_scale(1.0 - p, type);
  auto kernel = [drawn = drawn_mask(self, 1.0 - p), type, scale](auto& from, auto& to) {
    to[0].copy_(from[0].to(type).mul(drawn).mul(scale));
    to[1].copy_(drawn);
  };
  launch("aten::native_dropout", {self}, {out, mask}, kernel);
  return {out, mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("native_dropout", native_dropout);
}

} // namespace

} // namespace sim
