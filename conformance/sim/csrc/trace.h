// Trace: what the host issued, in order, for a checker of happens-before; and what the device did with it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace sim {

// Bytes of device memory or of pinned host memory that an operator reads, or writes.
struct Range {
  uint64_t begin, end;
  bool write;
};

// Kinds: `op` (an operator, copy or collective is queued on `stream`), `record` and `wait` (of `event`, by a stream),
// `host_wait_event`, `host_wait_stream`, `host_wait_read` (number, copy), `host_wait_device` (each stream of a device), `query` (the
// host asks whether a stream got somewhere), `host` (the host itself reads or writes pinned memory), `stream` (is
// created on device `event`, with a name if the program does not choose one), `alloc`, `alloc_pinned`, `free_later` (free, but for streams that record_stream named), `free` (may be
// handed out again), `record_stream`.
struct Record {
  const char* kind;
  int64_t stream;
  std::string name;
  int64_t event;
  std::vector<Range> ranges;
  int64_t number; // of an operator, from 1; else 0
  int64_t site;
};

// Bytes that the host got from the device by the operator with a number.
struct Read {
  int64_t number;
  uint64_t digest;
};

// What the device did: numbers of operators in the order in which they ran, and what the host read.
struct Execution {
  std::vector<int64_t> order;
  std::vector<Read> reads;
};

class Trace {
 public:
  void start();
  std::vector<Record> stop();
  bool is_on() const {
    return on_;
  }
  size_t size() const {
    return records_.size();
  }
  void add(const char* kind, int64_t stream, std::string name = "", int64_t event = 0, std::vector<Range> ranges = {});

  // Number of the operator that is added last, also while the trace is off.
  int64_t number() const {
    return operators_;
  }
  void runs(int64_t number);
  // The operator that runs gives these bytes to the host.
  void read(const void* bytes, size_t size);
  Execution take_execution() {
    return std::exchange(execution_, {});
  }

 private:
  bool on_ = false;
  int64_t operators_ = 0;
  std::vector<Record> records_;
  Execution execution_;
};

Trace& trace();

uint64_t digest(const void* bytes, size_t size);

} // namespace sim
