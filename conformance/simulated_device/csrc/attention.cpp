// Attention by the kernel that the CPU would choose, so that both compute the same in every bit. Without this, torch
// takes the generic decomposition for devices of this kind.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <torch/library.h>

#include "views.h"

namespace sim {

namespace {

constexpr int64_t kFlashAttention = 1; // sdp::SDPBackend::flash_attention, ATen/SDPBackend.h

at::Tensor scaled_dot_product_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  auto choice = [&] {
    BelowDispatch below;
    std::optional<at::Tensor> host_mask;
    if (mask && mask->defined()) host_mask = kernel_view(*mask);
    return at::_fused_sdp_choice(
        kernel_view(query), kernel_view(key), kernel_view(value), host_mask, dropout, is_causal, scale, enable_gqa);
  };
  if (choice() == kFlashAttention)
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, mask, scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout, is_causal, std::nullopt, scale, enable_gqa));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("scaled_dot_product_attention", scaled_dot_product_attention);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("scaled_dot_product_attention", scaled_dot_product_attention);
}

} // namespace

} // namespace sim
