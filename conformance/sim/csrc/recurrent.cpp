// Cells of recurrent networks that torch fuses on a device of this kind, of the CPU's operators: their derivatives are
// those of the operators.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

namespace sim {

namespace {

using MaybeTensor = std::optional<at::Tensor>;

at::Tensor with_bias(const at::Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

// New hidden state, new cell state, and a workspace that only a kernel for the derivative would read.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& of_input,
    const at::Tensor& of_hidden,
    const at::Tensor& cell,
    const MaybeTensor& input_bias,
    const MaybeTensor& hidden_bias) {
  auto gates = (with_bias(of_hidden, hidden_bias) + with_bias(of_input, input_bias)).chunk(4, 1);
  at::Tensor next = at::sigmoid(gates[1]) * cell + at::sigmoid(gates[0]) * at::tanh(gates[2]);
  return {at::sigmoid(gates[3]) * at::tanh(next), next, at::empty({0}, cell.options())};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& of_input,
    const at::Tensor& of_hidden,
    const at::Tensor& hidden,
    const MaybeTensor& input_bias,
    const MaybeTensor& hidden_bias) {
  auto from_input = with_bias(of_input, input_bias).chunk(3, 1), from_hidden = with_bias(of_hidden, hidden_bias).chunk(3, 1);
  at::Tensor reset = at::sigmoid(from_hidden[0] + from_input[0]);
  at::Tensor update = at::sigmoid(from_hidden[1] + from_input[1]);
  at::Tensor next = at::tanh(from_input[2] + from_hidden[2] * reset);
  return {(hidden - next) * update + next, at::empty({0}, hidden.options())};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_gru_cell", gru_cell);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_gru_cell", gru_cell);
}

} // namespace

} // namespace sim
