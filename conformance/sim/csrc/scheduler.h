// Streams as queues without threads: a deterministic scheduler decides when a queued task runs.
//
// A task runs after all earlier tasks of its stream, after the point that it waits for, and (collectives) after all
// collectives that this process issued before. Every order that these rules allow is one that a device could have
// taken; a schedule picks one of them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>

namespace sim {

enum class Policy {
  kEager, // at once: the device keeps up with the host
  kLazy, // only when the host waits for it, and no more than that needs: the device is as late as can be
  kRandom, // after each task that is issued, a few steps of streams drawn from a seed
  kStarved, // one stream lazily, all others eagerly
  kDelayed, // some operators, and what is behind them in their streams, lazily, all others eagerly
};

// Place in a stream: reached when the stream has done as many tasks. The default is always reached.
struct Point {
  int64_t stream = 0;
  int64_t position = 0;
};

struct Task {
  std::string name;
  std::function<void()> run; // nothing for a mere point or wait
  Point after = {};
  bool is_collective = false;
  int64_t number = 0; // of an operator, by which the trace knows it; 0 for all else
};

class Scheduler {
 public:
  int64_t new_stream(int device, const char* name = "");
  int64_t default_stream(int device);
  int device_of(int64_t stream) const {
    return queues_.at(stream).device;
  }
  int64_t count() const {
    return static_cast<int64_t>(queues_.size());
  }

  // Runs all that is queued, then follows another schedule. `first` is the seed of kRandom; of kStarved it is the number
  // of a stream among those that are created from now on, from 1; kDelayed delays the operators `first` to `last` of the
  // process, from 1.
  void follow(Policy policy, int64_t first, int64_t last);

  // Queues a task; returns the point that is reached when it has run.
  Point enqueue(int64_t stream, Task task);

  // The point behind all tasks that a stream has so far.
  Point end_of(int64_t stream) const;
  bool reached(Point point) const;

  // Whether a point is reached, as the host asks it. A host may ask until it is: each time the device does a bit more.
  bool query(Point point);

  // Runs what is needed to reach a point, or all tasks.
  void reach(Point point);
  void drain();
  void finish_collectives();

  // Tasks that were issued or taken up.
  int64_t steps() const {
    return steps_;
  }
  int64_t executed() const {
    return executed_;
  }

 private:
  struct Queue {
    struct Entry {
      Task task;
      int64_t collective; // number among this process's collectives, 0 for other tasks
    };
    int device = 0;
    std::deque<Entry> entries;
    int64_t issued = 0, done = 0;
  };

  void step(int64_t stream);
  void run(const Task& task, int64_t stream);
  void advance(const Task& task, int64_t issued_on);
  bool is_delayed(const Task& task) const;
  bool has_delayed(const Queue& queue) const;
  uint64_t draw(uint64_t limit);

  std::deque<Queue> queues_ = std::deque<Queue>(1); // the first is the default stream of the first device
  std::map<int, int64_t> default_streams_ = {{0, 0}}; // by device
  std::map<int64_t, Point> collectives_; // points of those that have not run
  int64_t collectives_issued_ = 0, executed_ = 0, steps_ = 0;
  Policy policy_ = Policy::kEager;
  int64_t starved_ = 0, first_delayed_ = 0, last_delayed_ = 0;
  uint64_t random_ = 1;
};

Scheduler& scheduler();

// Device on which this thread works, and the stream on which it issues there, or on another device.
int current_device();
int64_t current_stream();
int64_t current_stream(int device);
// Makes another device, or another stream of its device, current; returns the former.
int exchange_device(int device);
int64_t exchange_stream(int64_t stream);

// The host waits: for a point, which the trace knows as `event` or as the end of a stream, for what it reads (a
// number, or a copy in pageable memory), or for all streams of a device.
void host_wait_event(Point point, int64_t event);
void host_wait_stream(int64_t stream);
void host_wait_read(int64_t stream);
void host_wait_device(int device);

} // namespace sim
