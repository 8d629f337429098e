// Page-locked memory of the host. The device copies from and to it while the host goes on, so a freed block is handed
// out again only when the streams of its copies have got to where they were when it was freed.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "scheduler.h"

namespace sim {

constexpr size_t kPageBytes = 4096; // blocks are made of them, so that they can be protected

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;
  bool record_event(void* address, void* context, c10::Stream stream) override;
  void empty_cache() override;
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override;
  void reset_peak_stats() override;

  // Fills blocks that are handed out with NaN.
  void poison(bool on);
  bool contains(const void* address);
  // A copy on a stream uses the block with this address.
  void use(const void* address, int64_t stream);
  // Number (negative, unlike those of segments of the device) and first byte of the block with this address.
  std::pair<int64_t, uint64_t> block_of(uint64_t address) const;

 private:
  struct Block {
    size_t bytes;
    int64_t number;
    std::set<int64_t> streams; // of copies since the block was handed out
    std::vector<Point> ends; // of these streams when it was freed
  };
  using Blocks = std::map<char*, Block>;

  static bool is_done(const Block& block); // its copies have run
  static void free_data(void* data);
  Blocks::iterator reusable(size_t bytes);
  Blocks::iterator holding(const void* address);

  Blocks in_use_, free_;
  int64_t blocks_ever_ = 0;
  bool poison_ = false;
};

PinnedAllocator& pinned_memory();

} // namespace sim
