#include "collectives.h"

#include <ATen/ops/cat.h>
#include <pybind11/chrono.h>
#include <torch/csrc/api/include/torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator.h"
#include "device.h"
#include "kernels.h"
#include "lock.h"
#include "progress.h"
#include "views.h"

namespace sim {

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Gloo = c10::intrusive_ptr<c10d::Backend>;

Lifetime lifetime = Lifetime::kHeldUntilWait;

// Up to torch 2.7 the synchronous collectives of FSDP did without record_stream, see
// https://github.com/pytorch/pytorch/pull/111431. The forms with lists of tensors did not; nothing here uses them.
bool records_streams(const std::string& name, bool is_asynchronous) {
  bool is_of_fsdp = name == "all_gather" || name == "reduce_scatter";
  return lifetime == Lifetime::kRecordStream && (is_asynchronous || !is_of_fsdp);
}

// Collective in a stream. It holds its tensors until somebody waits for it; `wait` makes the current stream wait, not the
// host.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(Point done, int64_t event, Tensors inputs, Tensors outputs)
      : done_(done),
        event_(event),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)) {}

  bool isCompleted() override {
    Lock lock;
    trace().add("query", done_.stream, "", event_);
    return scheduler().query(done_);
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    Lock lock;
    int64_t waiting = current_stream(scheduler().device_of(done_.stream));
    if (waiting != done_.stream) {
      trace().add("wait", waiting, "", event_);
      scheduler().enqueue(waiting, {"wait", nullptr, done_});
    }
    inputs_.clear();
  }
  Tensors result() override {
    return outputs_;
  }
  // Complete at once, as ProcessGroupNCCL's: whoever waits for it makes a stream wait for the collective's. DDP waits for
  // its gradients so.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future_) {
      auto type = c10::ListType::create(c10::TensorType::get());
      c10::Device device = stream_of(done_.stream).device();
      future_ = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{device});
      int64_t caller = exchange_stream(done_.stream);
      future_->markCompleted(c10::IValue(outputs_));
      exchange_stream(caller);
    }
    return future_;
  }

 private:
  Point done_;
  int64_t event_;
  Tensors inputs_, outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Collectives and transfers that were issued as a group.
class GroupWork final : public c10d::Work {
 public:
  explicit GroupWork(std::vector<WorkPtr> works) : works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isCompleted(); });
  }
  bool wait(std::chrono::milliseconds limit) override {
    for (const auto& work : works_) work->wait(limit);
    return true;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  Tensors result() override {
    Tensors all;
    for (const auto& work : works_)
      for (auto& tensor : work->result()) all.push_back(tensor);
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return works_.back()->getFuture();
  }

 private:
  std::vector<WorkPtr> works_;
};

// What ProcessGroupNCCL's watchdog does with TORCH_NCCL_ASYNC_ERROR_HANDLING=3, the default: a collective that is not over
// within the limit of its process group ends the process, whoever waits for it.
// https://docs.pytorch.org/docs/stable/user_guide/torch_nccl_environment_variables.html
struct Watchdog {
  int rank;
  std::chrono::milliseconds limit;

  template <class Wait>
  void watch(const char* name, int64_t number, Wait wait) const {
    auto start = std::chrono::steady_clock::now();
    try {
      wait();
    } catch (const std::exception&) { // a peer that is gone is an error for whoever waits
      auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
      if (waited < limit) throw;
      std::fprintf(
          stderr,
          "[Rank %d] Watchdog caught collective operation timeout: WorkSim(SeqNum=%lld, OpType=%s, Timeout(ms)=%lld) "
          "ran for %lld milliseconds before timing out. The process is taken down.\n",
          rank,
          static_cast<long long>(number),
          name,
          static_cast<long long>(limit.count()),
          static_cast<long long>(waited.count()));
      std::abort();
    }
  }
};

// A transfer between two ranks is asynchronous, as ProcessGroupNCCL's.
struct TransferOptions {
  bool asyncOp = true;
};

// Options that Python can copy, as split_group does.
struct GroupOptions final : c10d::Backend::Options {
  explicit GroupOptions(std::chrono::milliseconds limit) : Options("simccl", limit) {}
};

class SimulatedBackend final : public c10d::Backend {
 public:
  SimulatedBackend(Gloo gloo, std::chrono::milliseconds limit)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), watchdog_{getRank(), limit} {}

  const std::string getBackendName() const override {
    return "simccl";
  }
  void setTimeout(std::chrono::milliseconds limit) override {
    watchdog_.limit = limit;
  }
  // A group of collectives and transfers has one work, and none of its transfers waits for another: the sends come first.
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override {
    group_.emplace();
  }
  WorkPtr endCoalescing() override {
    for (auto& [tensors, from_rank, tag] : group_->receives) receive(tensors, from_rank, tag);
    auto works = std::move(group_->works);
    group_.reset();
    if (works.empty()) return WorkPtr();
    return c10::make_intrusive<GroupWork>(std::move(works));
  }
  void setSequenceNumberForGroup() override {} // counted from 0 in each group
  uint64_t getSequenceNumberForGroup() override {
    return issued_;
  }
  c10::intrusive_ptr<GroupOptions> options() const {
    return c10::make_intrusive<GroupOptions>(watchdog_.limit);
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  bool supportsSplitting() const override {
    return true;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options();
  }
  // Returns a new backend for some ranks of the group; none for a rank that is not among them.
  Gloo split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    auto place = std::find(ranks.begin(), ranks.end(), getRank());
    if (place == ranks.end()) return {};
    auto own_store = c10::make_intrusive<c10d::PrefixStore>(options->group_name, store->clone());
    py::gil_scoped_acquire python;
    return py::module_::import("conformance.sim.device")
        .attr("make_backend")(own_store, place - ranks.begin(), ranks.size(), options->timeout)
        .cast<Gloo>();
  }
#endif
  void shutdown() override {
    drain();
    for (auto& [work, buffer] : sent_) work->wait();
    sent_.clear();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return issue("broadcast", tensors, tensors, options, [](auto& gloo, auto&, auto& to, auto& options) {
      return gloo->broadcast(to, options);
    });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return issue("all_reduce", tensors, tensors, options, [](auto& gloo, auto&, auto& to, auto& options) {
      scale_in_place(to, options);
      return gloo->allreduce(to, options);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return issue("all_reduce", tensors, tensors, options, [](auto& gloo, auto&, auto& to, auto& options) {
      return gloo->allreduce_coalesced(to, options);
    });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return issue("reduce", tensors, tensors, options, [](auto& gloo, auto&, auto& to, auto& options) {
      scale_in_place(to, options);
      return gloo->reduce(to, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return issue("all_gather", {input}, {output}, options, [](auto& gloo, auto& from, auto& to, auto& options) {
      return gloo->_allgather_base(to[0], from[0], options);
    });
  }
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return issue("all_gather", inputs, outputs.at(0), options, [](auto& gloo, auto& from, auto& to, auto& options) {
      std::vector<Tensors> lists{to};
      return gloo->allgather(lists, from, options);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return issue("all_gather", inputs, outputs, options, [](auto& gloo, auto& from, auto& to, auto& options) {
      return gloo->allgather_into_tensor_coalesced(to, from, options);
    });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return issue("reduce_scatter", {input}, {output}, options, [](auto& gloo, auto& from, auto& to, auto& options) {
      scale(from, options);
      return gloo->_reduce_scatter_base(to[0], from[0], options);
    });
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return issue("reduce_scatter", inputs.at(0), outputs, options, [](auto& gloo, auto& from, auto& to, auto& options) {
      scale(from, options);
      std::vector<Tensors> lists{from};
      return gloo->reduce_scatter(to, lists, options);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return issue("reduce_scatter", inputs, outputs, options, [](auto& gloo, auto& from, auto& to, auto& options) {
      scale(from, options);
      return gloo->reduce_scatter_tensor_coalesced(to, from, options);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto run = [sent = input_sizes, received = output_sizes](auto& gloo, auto& from, auto& to, auto& options) mutable {
      return gloo->alltoall_base(to[0], from[0], received, sent, options);
    };
    return issue("all_to_all", {input}, {output}, options, run);
  }
  // Gloo has only the form with one tensor.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return issue("all_to_all", inputs, outputs, options, [](auto& gloo, auto& from, auto& to, auto& options) {
      at::Tensor sent = flat(from), received = flat(to);
      std::vector<int64_t> sent_sizes = sizes(from), received_sizes = sizes(to);
      auto work = gloo->alltoall_base(received, sent, received_sizes, sent_sizes, options);
      work->wait();
      Tensors shares = received.split_with_sizes(received_sizes);
      for (size_t rank = 0; rank < to.size(); ++rank) to[rank].copy_(shares[rank].view_as(to[rank]));
      return work;
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors list = inputs.empty() ? Tensors() : inputs[0];
    return issue("scatter", list, outputs, options, [](auto& gloo, auto& from, auto& to, auto& options) {
      std::vector<Tensors> lists(from.empty() ? 0 : 1, from);
      return gloo->scatter(to, lists, options);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors list = outputs.empty() ? Tensors() : outputs[0];
    return issue("gather", inputs, list, options, [](auto& gloo, auto& from, auto& to, auto& options) {
      std::vector<Tensors> lists(to.empty() ? 0 : 1, to);
      return gloo->gather(lists, from, options);
    });
  }
  // The device does not wait for the receiver: what is sent leaves it at once, into a buffer. Otherwise two ranks that
  // send to each other could wait for each other, which NCCL avoids by grouping their transfers.
  WorkPtr send(Tensors& tensors, int to_rank, int tag) override {
    check_transfer(to_rank);
    auto run = [this, to_rank, tag](auto& gloo, auto& from, auto&, auto&) {
      auto buffer = std::make_shared<Tensors>();
      for (const auto& tensor : from) buffer->push_back(tensor.clone());
      if (to_rank == getRank())
        to_self_[tag].push_back(buffer);
      else
        sent_.emplace_back(gloo->send(*buffer, to_rank, tag), buffer);
      return c10::intrusive_ptr<c10d::Work>();
    };
    if (!is_on_device(tensors.at(0))) {
      drain();
      return grouped(gloo_->send(tensors, to_rank, tag));
    }
    return issue("send", tensors, {}, TransferOptions(), run);
  }
  WorkPtr recv(Tensors& tensors, int from_rank, int tag) override {
    check_transfer(from_rank);
    if (!group_) return receive(tensors, from_rank, tag);
    group_->receives.push_back({tensors, from_rank, tag});
    return WorkPtr();
  }
  // The host waits for the current stream, as in ProcessGroupNCCL. All streams make progress meanwhile; no order rests on that.
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    host_wait_stream(current_stream());
    drain();
    return gloo_->barrier(options);
  }

 private:
  struct Receive {
    Tensors tensors;
    int from_rank, tag;
  };
  struct Group {
    std::vector<WorkPtr> works;
    std::vector<Receive> receives;
  };

  // NCCL's PREMUL_SUM multiplies each number before it is added; gloo has no such sum.
  template <class Options>
  static void scale(Tensors& tensors, Options& options) {
    if (options.reduceOp.op_ != c10d::ReduceOp::PREMUL_SUM) return;
    const auto* supplement = static_cast<const c10d::NCCLPreMulSumSupplement*>(options.reduceOp.supplement_.get());
    TORCH_CHECK(!supplement->tensor_factor.defined(), "simccl has PREMUL_SUM for a number only, not for a tensor");
    for (auto& tensor : tensors) tensor = tensor.mul(supplement->double_factor);
    options.reduceOp = c10d::ReduceOp::SUM;
  }
  template <class Options>
  static void scale_in_place(Tensors& tensors, Options& options) {
    Tensors scaled = tensors;
    scale(scaled, options);
    for (size_t i = 0; i < tensors.size(); ++i)
      if (!scaled[i].is_same(tensors[i])) tensors[i].copy_(scaled[i]);
  }
  static at::Tensor flat(const Tensors& tensors) {
    Tensors rows;
    for (const auto& tensor : tensors) rows.push_back(tensor.reshape(-1));
    return at::cat(rows);
  }
  static std::vector<int64_t> sizes(const Tensors& tensors) {
    std::vector<int64_t> all;
    for (const auto& tensor : tensors) all.push_back(tensor.numel());
    return all;
  }

  WorkPtr receive(Tensors& tensors, int from_rank, int tag) {
    return issue("recv", {}, tensors, TransferOptions(), [this, from_rank, tag](auto& gloo, auto&, auto& to, auto&) {
      if (from_rank != getRank()) return gloo->recv(to, from_rank, tag);
      auto& buffers = to_self_[tag];
      TORCH_CHECK(!buffers.empty(), "simccl: a rank receives from itself, and its group has no matching send");
      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(buffers.front()->at(i));
      buffers.pop_front();
      return WorkPtr();
    });
  }

  // NCCL copies from a rank to itself only within a group, and else ends with "Trying to send to self without a matching
  // recv" (ncclInvalidUsage, src/enqueue.cc); gloo has no such transfer.
  void check_transfer(int peer) const {
    TORCH_CHECK(group_ || peer != getRank(), "simccl: a rank sends to itself, or receives, outside of a group");
  }

  // A device makes progress while its host waits for other hosts. Without that, one rank could wait here for a peer that
  // waits in a collective of the device for this rank's.
  void drain() {
    Lock lock;
    scheduler().drain();
  }

  template <class Options, class Run>
  WorkPtr issue(const char* name, Tensors inputs, Tensors outputs, const Options& options, Run run) {
    const Tensors& any = inputs.empty() ? outputs : inputs;
    if (!is_on_device(any.at(0))) {
      drain();
      return grouped(run(gloo_, inputs, outputs, const_cast<Options&>(options)));
    }
    Lock lock;
    OnDevice scope(any.at(0).device());
    int64_t caller = current_stream();
    if (options.asyncOp || lifetime != Lifetime::kHeldUntilWait) enter_own_stream();
    WorkPtr work = issue_on_current_stream(name, std::move(inputs), std::move(outputs), options, std::move(run));
    exchange_stream(caller);
    return work;
  }

  // The stream of collectives first waits for what the caller has issued.
  void enter_own_stream() {
    if (!stream_) stream_ = scheduler().new_stream(current_device(), "stream of collectives");
    wait_for(*stream_, current_stream());
    exchange_stream(*stream_);
  }

  template <class Options, class Run>
  WorkPtr issue_on_current_stream(
      const char* name, Tensors inputs, Tensors outputs, const Options& options, Run run) {
    auto kernel = [gloo = gloo_, watchdog = watchdog_, number = ++issued_, name, options = options, run](
                      const Tensors& inputs, const Tensors& outputs) mutable {
      Tensors from = inputs, to = outputs;
      WithoutPython others;
      watchdog.watch(name, number, [&] {
        if (WorkPtr work = run(gloo, from, to, options)) work->wait();
      });
    };
    start_progress();
    Point done = launch(name, inputs, outputs, std::move(kernel), true);
    int64_t event = new_event();
    trace().add("record", current_stream(), "", event);
    bool records = records_streams(name, options.asyncOp);
    if (records) record_current_stream(inputs, outputs);
    if (records || lifetime == Lifetime::kHeldUntilWait && !options.asyncOp) inputs.clear();
    return grouped(c10::make_intrusive<StreamWork>(done, event, std::move(inputs), std::move(outputs)));
  }

  WorkPtr grouped(WorkPtr work) {
    if (group_) group_->works.push_back(work);
    return work;
  }

  static void record_current_stream(const Tensors& inputs, const Tensors& outputs) {
    c10::Stream stream = stream_of(current_stream());
    for (const Tensors* tensors : {&inputs, &outputs})
      for (const auto& tensor : *tensors) allocators().recordStream(tensor.storage().data_ptr(), stream);
  }

  Gloo gloo_;
  Watchdog watchdog_;
  int64_t issued_ = 0;
  std::optional<int64_t> stream_;
  std::optional<Group> group_; // between startCoalescing and endCoalescing
  // Kept until the end: gloo does not say that a transfer is over until somebody waits for it.
  std::vector<std::pair<WorkPtr, std::shared_ptr<Tensors>>> sent_;
  std::map<int, std::deque<std::shared_ptr<Tensors>>> to_self_; // by tag
};

} // namespace

void bind_collectives(pybind11::module_& module) {
  py::class_<GroupOptions, c10::intrusive_ptr<GroupOptions>, c10d::Backend::Options>(module, "GroupOptions")
      .def("__deepcopy__", [](const GroupOptions& options, const py::dict&) {
        return c10::make_intrusive<GroupOptions>(options);
      });
  py::class_<SimulatedBackend, c10::intrusive_ptr<SimulatedBackend>, c10d::Backend>(module, "SimulatedBackend")
      .def_property_readonly("options", &SimulatedBackend::options);
  module.def("make_backend", [](Gloo gloo, int64_t limit_ms) -> Gloo {
    return c10::make_intrusive<SimulatedBackend>(std::move(gloo), std::chrono::milliseconds(limit_ms));
  });
  module.def("use_lifetime", [](int chosen) { lifetime = static_cast<Lifetime>(chosen); });
}

} // namespace sim
