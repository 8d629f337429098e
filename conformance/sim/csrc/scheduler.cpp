#include "scheduler.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "lock.h"
#include "trace.h"

namespace sim {

namespace {
thread_local int device_now = 0;
thread_local std::map<int, int64_t> streams_now; // by device; the default stream if there is none
}

int64_t Scheduler::new_stream(int device, const char* name) {
  queues_.emplace_back();
  queues_.back().device = device;
  trace().add("stream", count() - 1, name, device);
  return count() - 1;
}

int64_t Scheduler::default_stream(int device) {
  auto found = default_streams_.find(device);
  if (found == default_streams_.end())
    found = default_streams_.emplace(device, new_stream(device, "default stream")).first;
  return found->second;
}

void Scheduler::follow(Policy policy, int64_t first, int64_t last) {
  drain();
  policy_ = policy;
  starved_ = count() - 1 + first;
  first_delayed_ = first;
  last_delayed_ = last;
  random_ = (static_cast<uint64_t>(first) + 1) * 0x9E3779B97F4A7C15u; // never 0, where xorshift would stay
}

Point Scheduler::enqueue(int64_t stream, Task task) {
  ++steps_;
  Queue& queue = queues_.at(stream);
  Point point{stream, ++queue.issued};
  int64_t collective = task.is_collective ? ++collectives_issued_ : 0;
  if (collective) collectives_[collective] = point;
  queue.entries.push_back({std::move(task), collective});
  advance(queue.entries.back().task, stream);
  return point;
}

void Scheduler::advance(const Task& task, int64_t issued_on) {
  if (policy_ == Policy::kEager || (policy_ == Policy::kStarved && issued_on != starved_)) reach(end_of(issued_on));
  // A wait by itself needs nothing yet: the operator behind it does.
  if (policy_ == Policy::kDelayed && task.number && !has_delayed(queues_[issued_on])) reach(end_of(issued_on));
  if (policy_ != Policy::kRandom) return;
  for (uint64_t steps = draw(3); steps > 0; --steps) {
    int64_t stream = static_cast<int64_t>(draw(queues_.size()));
    if (!queues_[stream].entries.empty()) step(stream);
  }
}

bool Scheduler::is_delayed(const Task& task) const {
  return first_delayed_ <= task.number && task.number <= last_delayed_;
}

bool Scheduler::has_delayed(const Queue& queue) const {
  return std::any_of(
      queue.entries.begin(), queue.entries.end(), [this](const auto& entry) { return is_delayed(entry.task); });
}

Point Scheduler::end_of(int64_t stream) const {
  return {stream, queues_.at(stream).issued};
}

bool Scheduler::reached(Point point) const {
  return queues_.at(point.stream).done >= point.position;
}

bool Scheduler::query(Point point) {
  if (reached(point)) return true;
  step(point.stream);
  return false;
}

void Scheduler::reach(Point point) {
  while (!reached(point)) step(point.stream);
}

void Scheduler::drain() {
  for (int64_t stream = 0; stream < count(); ++stream) reach(end_of(stream));
}

void Scheduler::finish_collectives() {
  while (!collectives_.empty()) reach(Point(collectives_.begin()->second));
}

// Runs the first task of a stream, after all that it depends on.
void Scheduler::step(int64_t stream) {
  Queue& queue = queues_[stream];
  TORCH_INTERNAL_ASSERT(!queue.entries.empty(), "stream ", stream, " waits for itself");
  ++steps_;
  // An error in another stream leaves this one as it is.
  reach(queue.entries.front().task.after);
  if (int64_t number = queue.entries.front().collective)
    while (collectives_.begin()->first < number) reach(Point(collectives_.begin()->second));
  auto entry = std::move(queue.entries.front());
  queue.entries.pop_front();
  if (entry.collective) collectives_.erase(entry.collective);
  ++queue.done;
  run(entry.task, stream);
}

// A task fails far from where it was issued: the message says which it was.
void Scheduler::run(const Task& task, int64_t stream) {
  if (!task.run) return;
  ++executed_;
  if (task.number) trace().runs(task.number);
  auto failed = [&](const char* reason) {
    TORCH_CHECK(false, "simulated device: ", task.name, ", queued on stream ", stream, ", failed: ", reason);
  };
  try {
    task.run();
  } catch (const c10::Error& error) {
    failed(error.what_without_backtrace());
  } catch (const std::exception& error) {
    failed(error.what());
  }
}

uint64_t Scheduler::draw(uint64_t limit) {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return (random_ >> 16) % limit;
}

Scheduler& scheduler() {
  static Scheduler* instance = new Scheduler; // never destroyed: tensors outlive static objects
  return *instance;
}

int current_device() {
  return device_now;
}

int64_t current_stream() {
  return current_stream(device_now);
}

int64_t current_stream(int device) {
  Lock lock;
  auto found = streams_now.find(device);
  return found == streams_now.end() ? scheduler().default_stream(device) : found->second;
}

int exchange_device(int device) {
  return std::exchange(device_now, device);
}

int64_t exchange_stream(int64_t stream) {
  Lock lock;
  int device = scheduler().device_of(stream);
  int64_t before = current_stream(device);
  streams_now[device] = stream;
  return before;
}

void host_wait_event(Point point, int64_t event) {
  Lock lock;
  trace().add("host_wait_event", point.stream, "", event);
  scheduler().reach(point);
}

void host_wait_stream(int64_t stream) {
  Lock lock;
  trace().add("host_wait_stream", stream);
  scheduler().reach(scheduler().end_of(stream));
}

void host_wait_read(int64_t stream) {
  Lock lock;
  trace().add("host_wait_read", stream);
  scheduler().reach(scheduler().end_of(stream));
}

void host_wait_device(int device) {
  Lock lock;
  for (int64_t stream = 0; stream < scheduler().count(); ++stream) {
    if (scheduler().device_of(stream) != device) continue;
    trace().add("host_wait_device", stream);
    scheduler().reach(scheduler().end_of(stream));
  }
}

} // namespace sim
