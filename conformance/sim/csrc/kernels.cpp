#include "kernels.h"

#include <utility>

#include "device.h"
#include "lock.h"
#include "views.h"

namespace sim {

Point launch(
    const std::string& name, const Tensors& inputs, const Tensors& outputs, Kernel kernel, bool is_collective) {
  Lock lock;
  std::vector<Range> ranges;
  auto views_of = [&](const Tensors& tensors, bool write) {
    Tensors views;
    for (const auto& tensor : tensors) {
      views.push_back(tensor.defined() ? kernel_view(tensor) : tensor);
      if (is_on_device(tensor)) ranges.push_back(range_of(tensor, write));
    }
    return views;
  };
  Tensors from = views_of(inputs, false), to = views_of(outputs, true);
  auto run = [from = std::move(from), to = std::move(to), kernel = std::move(kernel)] {
    BelowDispatch below;
    kernel(from, to);
  };
  return queue(name, std::move(ranges), std::move(run), is_collective);
}

} // namespace sim
