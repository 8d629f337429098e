// Results of operators, as torch's kernels for meta tensors infer them: remembered, since most of these are Python.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace sim {

using Values = std::vector<c10::IValue>;

// All that an inference may depend on: the operator, the layouts of its operands, which of them share memory, the values
// that the host passes, and torch's settings. Nothing for operators that others than torch may define, and for operands
// of unknown kinds.
std::optional<std::string> call_key(const c10::OperatorHandle& op, const Values& arguments);

// Tensors on meta in place of new results, or nothing where only a run tells them.
using Inferred = std::optional<Values>;

// What is remembered of a call, or nullptr.
const Inferred* remembered(const std::string& call);

void remember(std::string call, Inferred inferred);

} // namespace sim
