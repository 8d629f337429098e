// Caching allocator of a device, by the rules of CUDA's: blocks are cut from segments, kept in pools of their stream
// when they are freed, and handed out again at once, since what the same stream runs later runs later.
// https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-memory-management and c10/cuda/CUDACachingAllocator.cpp
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "scheduler.h"
#include "trace.h"

namespace sim {

struct Block {
  char* begin;
  size_t bytes;
  int64_t stream;
  bool small;
  size_t requested_bytes = 0;
  int64_t number = 0; // of the allocation in this process, from 1
  bool in_use = false;
  bool untouched = false; // poison is due before the first use
  int pending = 0; // streams that record_stream named and that had not caught up when the block was freed
  std::set<int64_t> recorded;
  Block *before = nullptr, *after = nullptr; // neighbours in the segment
};

// Memory that was reserved at once, and its blocks, in the form of torch.cuda.memory_snapshot.
struct SegmentSnapshot {
  uint64_t address;
  size_t bytes;
  int64_t stream;
  bool small;
  std::vector<Block> blocks;
};

class CachingAllocator final : public c10::Allocator {
 public:
  explicit CachingAllocator(int device) : device_(device) {}

  // Fills what each block holds before the first use with NaN, on the stream that uses it first.
  void poison(bool on);
  // To be called before an operator is queued on a stream.
  void before_use(const std::vector<Range>& ranges, int64_t stream);
  // Number, requested bytes and digest of each block in use that was touched.
  std::vector<std::tuple<int64_t, size_t, uint64_t>> live() const;
  // Number and first byte of the segment with this address.
  std::pair<int64_t, uint64_t> segment_of(uint64_t address) const;

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

  void empty_cache();
  void record_stream(const c10::DataPtr& data, int64_t stream);
  c10::CachingDeviceAllocator::DeviceStats& statistics() {
    return statistics_;
  }
  std::vector<SegmentSnapshot> snapshot() const;
  // Bytes that are not reserved.
  size_t free_bytes() const;

 private:
  struct BySize {
    bool operator()(const Block* one, const Block* other) const;
  };
  using Pool = std::set<Block*, BySize>;

  Block* malloc(size_t bytes, int64_t stream);
  void free(Block* block);
  static void free_data(void* data);
  Block* best_fit(size_t bytes, int64_t stream, bool small);
  Block* new_segment(size_t bytes, int64_t stream, bool small);
  size_t place_of_segment(size_t bytes);
  void split(Block* block, size_t bytes);
  void release(Block* block);
  Block* merge(Block* first, Block* second);
  void release_caught_up();
  Block* block_at(uint64_t address) const;
  Pool& pool(bool small) {
    return small ? small_ : large_;
  }

  Pool small_, large_;
  std::map<const void*, Block*> in_use_; // by first byte
  std::deque<std::pair<Point, Block*>> held_; // freed, but for streams that have not caught up
  struct Segment {
    int64_t number;
    size_t bytes;
    Block* first;
  };

  int device_;
  std::map<uint64_t, Segment> segments_; // by first byte
  c10::CachingDeviceAllocator::DeviceStats statistics_;
  int64_t untouched_ = 0;
  bool poison_ = false;
};

CachingAllocator& allocator(int device);

// Allocator of the device that has this address.
CachingAllocator& allocator_at(const void* address);

// Allocator of the device on which a thread works, and the statistics of all, as torch.accelerator asks for them.
c10::DeviceAllocator& allocators();

} // namespace sim
