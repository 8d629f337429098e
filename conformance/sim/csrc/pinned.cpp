#include "pinned.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "device.h"
#include "lock.h"
#include "memory_map.h"
#include "trace.h"

namespace sim {

// Sizes are rounded up to powers of two, as by torch's host allocator: ATen/core/CachingHostAllocator.h.
c10::DataPtr PinnedAllocator::allocate(size_t bytes) {
  c10::Device host(c10::DeviceType::CPU);
  if (!bytes) return {nullptr, nullptr, &free_data, host};
  Lock lock;
  size_t size = 1;
  while (size < bytes) size *= 2;
  auto block = reusable(size);
  if (block == free_.end()) {
    auto* begin = static_cast<char*>(std::aligned_alloc(kPageBytes, std::max(size, kPageBytes)));
    TORCH_CHECK_WITH(OutOfMemoryError, begin, "no ", size, " bytes of host memory to pin");
    block = free_.emplace(begin, Block{size, -++blocks_ever_, {}, {}}).first;
  }
  char* begin = block->first;
  block->second.ends.clear();
  in_use_.insert(free_.extract(block));
  if (poison_) std::memset(begin, kPoison, bytes);
  auto address = reinterpret_cast<uint64_t>(begin);
  trace().add("alloc_pinned", -1, "", 0, {{address, address + size, true}});
  return {begin, begin, &free_data, host};
}

PinnedAllocator::Blocks::iterator PinnedAllocator::reusable(size_t bytes) {
  return std::find_if(free_.begin(), free_.end(), [bytes](const auto& entry) {
    return entry.second.bytes == bytes && is_done(entry.second);
  });
}

bool PinnedAllocator::is_done(const Block& block) {
  return std::all_of(block.ends.begin(), block.ends.end(), [](Point end) { return scheduler().reached(end); });
}

void PinnedAllocator::free_data(void* data) {
  if (!data) return;
  Lock lock;
  auto& self = pinned_memory();
  auto freed = self.in_use_.extract(static_cast<char*>(data));
  auto& block = freed.mapped();
  for (int64_t stream : std::exchange(block.streams, {})) block.ends.push_back(scheduler().end_of(stream));
  self.free_.insert(std::move(freed));
}

void PinnedAllocator::poison(bool on) {
  poison_ = on;
}

bool PinnedAllocator::contains(const void* address) {
  Lock lock;
  return holding(address) != in_use_.end();
}

void PinnedAllocator::use(const void* address, int64_t stream) {
  auto block = holding(address);
  if (block != in_use_.end()) block->second.streams.insert(stream);
}

PinnedAllocator::Blocks::iterator PinnedAllocator::holding(const void* address) {
  auto next = in_use_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (next == in_use_.begin()) return in_use_.end();
  auto block = std::prev(next);
  return address < block->first + block->second.bytes ? block : in_use_.end();
}

std::pair<int64_t, uint64_t> PinnedAllocator::block_of(uint64_t address) const {
  for (const Blocks* blocks : {&in_use_, &free_}) {
    auto next = blocks->upper_bound(reinterpret_cast<char*>(address));
    if (next == blocks->begin()) continue;
    auto block = std::prev(next);
    auto begin = reinterpret_cast<uint64_t>(block->first);
    if (address < begin + block->second.bytes) return {block->second.number, begin};
  }
  return {0, 0};
}

c10::DeleterFnPtr PinnedAllocator::raw_deleter() const {
  return &free_data;
}

void PinnedAllocator::copy_data(void* to, const void* from, size_t bytes) const {
  std::memcpy(to, from, bytes);
}

bool PinnedAllocator::record_event(void* address, void*, c10::Stream stream) {
  Lock lock;
  use(address, number_of(stream));
  return contains(address);
}

// Gives back the pages, not the addresses, by which traces know blocks.
void PinnedAllocator::empty_cache() {
  Lock lock;
  for (auto& [begin, block] : free_)
    if (is_done(block)) madvise(begin, std::max(block.bytes, kPageBytes), MADV_DONTNEED);
}

at::HostStats PinnedAllocator::get_stats() {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "the simulated device has no statistics of pinned memory");
}

void PinnedAllocator::reset_accumulated_stats() {
  get_stats();
}

void PinnedAllocator::reset_peak_stats() {
  get_stats();
}

PinnedAllocator& pinned_memory() {
  static auto* instance = new PinnedAllocator; // never destroyed: tensors outlive static objects
  return *instance;
}

} // namespace sim
