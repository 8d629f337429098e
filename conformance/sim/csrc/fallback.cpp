// Every operator that has no kernel of its own: the CPU's kernel, queued on the current stream.
//
// The operator is called on meta tensors for the shapes of its results, and for the errors that the host can know, once
// for each kind of call; the results are allocated at once, and the kernel runs when the schedule wants. Results that
// cannot be known beforehand make the host wait, as on a GPU (`nonzero`). Views are made at once by the CPU's kernels,
// which touch no memory.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>

#include "call.h"
#include "device.h"
#include "fallback.h"
#include "lock.h"
#include "statistics.h"

namespace sim {

namespace {

void copy_results(const std::vector<c10::IValue>& to, const Stack& from) {
  for (size_t k = 0; k < to.size(); ++k) {
    auto targets = tensors_in(to[k]), sources = tensors_in(from[k]);
    for (size_t j = 0; j < targets.size(); ++j) targets[j].copy_(sources[j]);
  }
}

} // namespace

void Call::run_later(Values results, Stack& stack) {
  Values targets;
  for (const auto& result : results) targets.push_back(map_tensors(result, kernel_view));
  auto run = [op = op_, arguments = host_arguments(Twins::over_same_bytes()), targets = std::move(targets)] {
    BelowDispatch below;
    Stack host = arguments;
    op.callBoxed(host);
    copy_results(targets, host);
  };
  queue(name(), ranges(results), std::move(run));
  mark_arguments(tried_arguments_);
  for (size_t k = 0; k < schema_.returns().size(); ++k) {
    auto argument = argument_returned_as(k);
    stack.push_back(argument ? arguments_[*argument] : results[k]);
  }
}

// The host waits for the results. An error is the kernel's own.
void Call::run_now(Stack& stack) {
  struct Run {
    Values arguments;
    Stack results;
    std::exception_ptr error;
  };
  statistics().waits[name()]++;
  BelowDispatch below;
  auto run = std::make_shared<Run>(); // an earlier task may fail, and leave this one in its queue
  run->arguments = host_arguments(Twins::over_same_bytes(/*may_grow=*/!overwrites_input()));
  Point done = queue(name(), ranges({}), [op = op_, run] {
    BelowDispatch below;
    run->results = run->arguments;
    try {
      op.callBoxed(run->results);
    } catch (...) {
      run->error = std::current_exception();
    }
  });
  if (op_.hasTag(at::Tag::dynamic_output_shape)) host_wait_read(done.stream); // as every device does
  else scheduler().reach(done); // not in the trace: only this device waits here
  if (run->error) std::rethrow_exception(run->error);
  auto moved = moved_arguments(run->arguments);
  lay_out_arguments(run->arguments);
  mark_arguments(run->arguments);
  for (auto& [tensor, twin] : moved) tensor.copy_(twin);
  auto on_the_device = [&](const at::Tensor& tensor) {
    at::Tensor result = on_device(tensor);
    if (tensor.numel()) result.copy_(tensor);
    return result;
  };
  for (size_t k = 0; k < schema_.returns().size(); ++k) {
    auto argument = argument_returned_as(k);
    stack.push_back(argument ? arguments_[*argument] : map_tensors(run->results[k], on_the_device));
  }
}

// Random numbers are drawn when the host issues the operator, as on a GPU: no schedule changes them.
void Call::draw_now(Stack& stack) {
  BelowDispatch below;
  const auto& self = arguments_[0].toTensor();
  at::Tensor drawn = at::empty_strided(self.sizes(), self.strides(), self.options().device(at::kCPU));
  Stack host = arguments_;
  host[0] = drawn;
  op_.callBoxed(host);
  queue(name(), ranges({}), [to = kernel_view(self), drawn] {
    BelowDispatch below;
    to.copy_(drawn);
  });
  stack.push_back(self);
}

namespace {

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Lock lock;
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
      "the simulated device has the CPU's kernels, and the CPU has none for ",
      op.schema().name());
  if (is_view(op.schema())) return op.callBoxedForDispatchKey(c10::DispatchKey::CPU, *stack);
  statistics().operators++;
  Call call(op, *stack);
  call.refuse_other_layouts();
  call.refuse_mixed_devices();
  OnDevice scope(call.device());
  if (call.is_random()) {
    bool is_seeded = call.seed();
    if (call.only_overwrites_self()) return call.draw_now(*stack);
    if (!is_seeded) return call.run_now(*stack);
  }
  auto results = call.infer();
  results ? call.run_later(std::move(*results), *stack) : call.run_now(*stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Operators that choose a kernel by the device themselves, and have none for this kind.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"convolution", "_convolution", "convolution_backward", "conj_physical_", "mode.values"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

} // namespace

void follow_cpu() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    auto op = dispatcher.findOp(name);
    if (name.getNamespace() != "aten" || !op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    if (!op->hasComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue; // reaches the fallback anyhow
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

} // namespace sim
