// Trace: what the host issued, in order, for a checker of happens-before.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sim {

// Bytes of device memory or of pinned host memory that an operator reads, or writes.
struct Range {
  uint64_t begin, end;
  bool write;
};

// Kinds: `op` (an operator, copy or collective is queued on `stream`), `record` and `wait` (of `event`, by a stream),
// `host_wait_event`, `host_wait_stream`, `host_wait_read` (number, copy), `host_wait_device` (all streams), `host` (the
// host itself reads or writes pinned memory), `alloc`, `alloc_pinned`, `free_later` (free, but for streams that record_stream named), `free` (may be handed out again), `record_stream`.
struct Record {
  const char* kind;
  int64_t stream;
  std::string name;
  int64_t event;
  std::vector<Range> ranges;
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

 private:
  bool on_ = false;
  std::vector<Record> records_;
};

Trace& trace();

} // namespace sim
