// Attention in the operators that CUDA chooses, with the numbers of the CPU's fused kernel.
//
// The choice is that of a device of compute capability 8.0 or more with deterministic algorithms, which cuDNN's kernels
// are not: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
// `conformance/numerics/device_operators.py` has it for oracles. So are the layouts of results, of
// https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/transformers/cuda/attention_backward.cu and
// flash_attn/flash_api.cpp beside it. CUDA's flash attention pads head sizes to multiples of 8 before; the CPU's kernel
// would round otherwise then.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>

#include "kernels.h"
#include "views.h"

namespace sim {

namespace {

using MaybeTensor = std::optional<at::Tensor>;

constexpr int64_t kFlashOfCpu = 1; // sdp::SDPBackend::flash_attention, ATen/SDPBackend.h
constexpr int64_t kFlashMaxHeadSize = 256;
constexpr int64_t kRowsOfSums = 32; // efficient attention has sums for multiples of as many rows: kAlignLSE

// The CPU's choice, were its fused kernel not switched off.
struct WithFlash {
  WithFlash() {
    at::globalContext().setSDPUseFlash(true);
  }
  ~WithFlash() {
    at::globalContext().setSDPUseFlash(was_on_);
  }

 private:
  bool was_on_ = at::globalContext().userEnabledFlashSDP();
};

// What is added to scores: a mask of bools keeps where it is true.
MaybeTensor as_bias(const MaybeTensor& mask, at::ScalarType dtype) {
  if (!mask || !mask->defined() || mask->scalar_type() != at::kBool) return mask;
  return at::zeros_like(*mask, dtype).masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
}

struct Attention {
  const at::Tensor &query, &key, &value;
  const MaybeTensor& mask;
  double dropout;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;

  bool has_mask() const {
    return mask && mask->defined();
  }
  bool is_half() const {
    return query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  }
  // Otherwise there is no kernel here whose numbers these operators could have.
  bool is_fused_on_cpu() const {
    if (dropout > 0.0 || (has_mask() && mask->requires_grad())) return false;
    BelowDispatch below;
    WithFlash flash;
    MaybeTensor of_mask;
    if (has_mask()) of_mask = kernel_view(*mask);
    return kFlashOfCpu ==
        at::_fused_sdp_choice(
               kernel_view(query), kernel_view(key), kernel_view(value), of_mask, dropout, is_causal, scale, enable_gqa);
  }
  bool is_flash() const {
    if (!at::globalContext().userEnabledFlashSDP()) return false;
    bool is_square = query.size(-2) == key.size(-2);
    return is_half() && !has_mask() && query.size(-1) <= kFlashMaxHeadSize && (is_square || !is_causal);
  }
  bool is_efficient() const {
    if (!at::globalContext().userEnabledMemEfficientSDP()) return false;
    int64_t alignment = is_half() ? 8 : 4;
    return (is_half() || query.scalar_type() == at::kFloat) && query.size(-1) % alignment == 0;
  }
  bool has_gradient() const {
    return at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad());
  }
};

at::Tensor scaled_dot_product_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const MaybeTensor& mask,
    double dropout,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  MaybeTensor bias = as_bias(mask, query.scalar_type());
  Attention attention{query, key, value, bias, dropout, is_causal, scale, enable_gqa};
  bool is_fused = attention.is_fused_on_cpu();
  if (is_fused && attention.is_flash())
    return std::get<0>(
        at::_scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, /*return_debug_mask=*/false, scale));
  if (is_fused && attention.is_efficient())
    return std::get<0>(at::_scaled_dot_product_efficient_attention(
        query, key, value, bias, attention.has_gradient(), dropout, is_causal, scale));
  TORCH_CHECK(
      at::globalContext().userEnabledMathSDP(),
      "No available kernel. Aborting execution. (fused attention of the simulated device has no dropout, no gradient of a ",
      "mask, and only shapes and dtypes of the CPU's)");
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, bias, dropout, is_causal, std::nullopt, scale, enable_gqa));
}

void refuse_dropout(double dropout) {
  TORCH_CHECK_NOT_IMPLEMENTED(dropout == 0.0, "fused attention of the simulated device has no dropout");
}

// Memory for a tensor of the shape (batch, heads, rows, head size): flash attention lays results and gradients out as what
// they belong to, efficient attention lays the heads of a row side by side.
using Empty = at::Tensor (*)(const at::Tensor& like);

at::Tensor empty_as_given(const at::Tensor& like) {
  return at::empty_like(like.transpose(1, 2)).transpose(1, 2);
}

at::Tensor empty_by_rows(const at::Tensor& like) {
  return at::empty_like(like.transpose(1, 2), at::MemoryFormat::Contiguous).transpose(1, 2);
}

// Result, and logarithms of sums of exponentials by batch, head and row, for a multiple of `multiple` rows.
std::tuple<at::Tensor, at::Tensor> attend(
    const char* name,
    Empty empty,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const MaybeTensor& mask,
    bool is_causal,
    std::optional<double> scale,
    bool wants_sums,
    int64_t multiple) {
  int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2);
  at::Tensor out = empty(query);
  int64_t padded = wants_sums ? (rows + multiple - 1) / multiple * multiple : 0;
  at::Tensor sums = at::empty({batch, heads, padded}, query.options().dtype(at::kFloat));
  auto kernel = [is_causal, scale, wants_sums, rows](auto& from, auto& to) {
    MaybeTensor mask;
    if (from[3].defined()) mask = from[3];
    auto [result, logarithms] =
        at::_scaled_dot_product_flash_attention_for_cpu(from[0], from[1], from[2], 0.0, is_causal, mask, scale);
    to[0].copy_(result);
    if (wants_sums) to[1].narrow(2, 0, rows).copy_(logarithms);
  };
  launch(name, {query, key, value, mask.value_or(at::Tensor())}, {out, sums}, kernel);
  return {out, sums};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const char* name,
    Empty empty,
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& mask,
    const at::Tensor& out,
    const at::Tensor& sums,
    bool is_causal,
    std::optional<double> scale) {
  at::Tensor of_query = empty(query), of_key = empty(key), of_value = empty(value);
  auto kernel = [is_causal, scale](auto& from, auto& to) {
    MaybeTensor mask;
    if (from[4].defined()) mask = from[4];
    auto logarithms = from[6].narrow(2, 0, from[1].size(2));
    auto [for_query, for_key, for_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        from[0], from[1], from[2], from[3], from[5], logarithms, 0.0, is_causal, mask, scale);
    to[0].copy_(for_query);
    to[1].copy_(for_key);
    to[2].copy_(for_value);
  };
  launch(name, {grad, query, key, value, mask, out, sums}, {of_query, of_key, of_value}, kernel);
  return {of_query, of_key, of_value};
}

// Without dropout the state of random numbers has memory and is not filled.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
flash_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    double dropout,
    bool is_causal,
    bool,
    std::optional<double> scale) {
  refuse_dropout(dropout);
  auto [out, sums] = attend(
      "aten::_scaled_dot_product_flash_attention",
      empty_as_given,
      query,
      key,
      value,
      std::nullopt,
      is_causal,
      scale,
      /*wants_sums=*/true,
      /*multiple=*/1);
  at::Tensor state = at::empty({2}, query.options().dtype(at::kUInt64));
  at::Tensor unused = at::empty({}, state.options()), debug_mask = at::empty({0}, query.options());
  return {out, sums, at::Tensor(), at::Tensor(), query.sym_size(2), key.sym_size(2), state, unused, debug_mask};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& out,
    const at::Tensor& sums,
    const at::Tensor&,
    const at::Tensor&,
    c10::SymInt,
    c10::SymInt,
    double,
    bool is_causal,
    const at::Tensor&,
    const at::Tensor&,
    std::optional<double> scale) {
  return attend_backward(
      "aten::_scaled_dot_product_flash_attention_backward",
      empty_as_given,
      grad,
      query,
      key,
      value,
      at::Tensor(),
      out,
      sums,
      is_causal,
      scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const MaybeTensor& mask,
    bool wants_sums,
    double dropout,
    bool is_causal,
    std::optional<double> scale) {
  refuse_dropout(dropout);
  auto [out, sums] = attend(
      "aten::_scaled_dot_product_efficient_attention",
      empty_by_rows,
      query,
      key,
      value,
      mask,
      is_causal,
      scale,
      wants_sums,
      kRowsOfSums);
  at::Tensor seed = at::empty({}, query.options().dtype(at::kLong)), offset = at::empty({}, seed.options());
  return {out, sums, seed, offset};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention_backward(
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& mask,
    const at::Tensor& out,
    const at::Tensor& sums,
    const at::Tensor&,
    const at::Tensor&,
    double,
    std::array<bool, 4>,
    bool is_causal,
    std::optional<double> scale) {
  auto [of_query, of_key, of_value] = attend_backward(
      "aten::_scaled_dot_product_efficient_attention_backward",
      empty_by_rows,
      grad,
      query,
      key,
      value,
      mask,
      out,
      sums,
      is_causal,
      scale);
  return {of_query, of_key, of_value, at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("scaled_dot_product_attention", scaled_dot_product_attention);
  library.impl("_scaled_dot_product_flash_attention", flash_attention);
  library.impl("_scaled_dot_product_flash_attention_backward", flash_attention_backward);
  library.impl("_scaled_dot_product_efficient_attention", efficient_attention);
  library.impl("_scaled_dot_product_efficient_attention_backward", efficient_attention_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("scaled_dot_product_attention", scaled_dot_product_attention);
}

} // namespace

} // namespace sim
