#include "allocator.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "device.h"
#include "lock.h"
#include "memory_map.h"

namespace sim {

namespace {

// Constants of c10/cuda/CUDACachingAllocator.h
constexpr size_t kMinBlockBytes = 512; // all sizes are rounded up to multiples
constexpr size_t kSmallBytes = 1 << 20; // up to here a block is small
constexpr size_t kSmallSegmentBytes = 2 << 20;
constexpr size_t kMinLargeSegmentBytes = 10 << 20; // from here a block has a segment of its own size ...
constexpr size_t kLargeSegmentBytes = 20 << 20; // ... and below this one
constexpr size_t kRoundSegmentBytes = 2 << 20;

constexpr size_t kGuardBytes = 4096; // between segments: nothing is merged over it

int64_t segments_ever = 0, allocations_ever = 0; // of all devices

size_t rounded(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

size_t segment_bytes(size_t bytes) {
  if (bytes <= kSmallBytes) return kSmallSegmentBytes;
  return bytes < kMinLargeSegmentBytes ? kLargeSegmentBytes : rounded(bytes, kRoundSegmentBytes);
}

Range bytes_of(const Block& block) {
  auto begin = reinterpret_cast<uint64_t>(block.begin);
  return {begin, begin + block.bytes, true};
}

bool is_free(const Block* block) {
  return block && !block->in_use && !block->pending;
}

void count(c10::CachingAllocator::StatArray& statistic, int64_t amount) {
  auto& total = statistic[0]; // StatType::AGGREGATE
  amount < 0 ? total.decrease(-amount) : total.increase(amount);
}

std::vector<c10::CachingAllocator::Stat*> totals(c10::CachingDeviceAllocator::DeviceStats& all) {
  return {
      &all.allocation[0],
      &all.segment[0],
      &all.active[0],
      &all.allocated_bytes[0],
      &all.active_bytes[0],
      &all.reserved_bytes[0],
      &all.requested_bytes[0]};
}

} // namespace

bool CachingAllocator::BySize::operator()(const Block* one, const Block* other) const {
  return std::tie(one->stream, one->bytes, one->begin) < std::tie(other->stream, other->bytes, other->begin);
}

c10::DataPtr CachingAllocator::allocate(size_t bytes) {
  Lock lock;
  void* data = bytes ? malloc(bytes, current_stream(device_))->begin : nullptr;
  auto index = static_cast<c10::DeviceIndex>(device_);
  return {data, data, &free_data, c10::Device(c10::DeviceType::PrivateUse1, index)};
}

Block* CachingAllocator::malloc(size_t bytes, int64_t stream) {
  map_memory();
  release_caught_up();
  size_t size = rounded(bytes, kMinBlockBytes);
  bool small = size <= kSmallBytes;
  Block* block = best_fit(size, stream, small);
  if (!block) block = new_segment(segment_bytes(size), stream, small);
  size_t rest = block->bytes - size;
  if (small ? rest >= kMinBlockBytes : rest > kSmallBytes) split(block, size);
  block->in_use = true;
  block->requested_bytes = bytes;
  block->number = ++allocations_ever;
  block->untouched = poison_;
  untouched_ += poison_;
  in_use_[block->begin] = block;
  count(statistics_.allocation, 1);
  count(statistics_.active, 1);
  count(statistics_.allocated_bytes, block->bytes);
  count(statistics_.active_bytes, block->bytes);
  count(statistics_.requested_bytes, bytes);
  trace().add("alloc", stream, "", 0, {bytes_of(*block)});
  return block;
}

Block* CachingAllocator::best_fit(size_t bytes, int64_t stream, bool small) {
  Block wanted{nullptr, bytes, stream, small};
  auto found = pool(small).lower_bound(&wanted);
  if (found == pool(small).end() || (*found)->stream != stream) return nullptr;
  Block* block = *found;
  pool(small).erase(found);
  return block;
}

Block* CachingAllocator::new_segment(size_t bytes, int64_t stream, bool small) {
  size_t place = place_of_segment(bytes);
  if (place + bytes > kMemoryBytes) {
    empty_cache();
    place = place_of_segment(bytes);
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, place + bytes <= kMemoryBytes, "the simulated device has no ", bytes, " bytes left");
  auto* block = new Block{device_address(device_, place), bytes, stream, small};
  segments_[reinterpret_cast<uint64_t>(block->begin)] = {++segments_ever, bytes, block};
  count(statistics_.segment, 1);
  count(statistics_.reserved_bytes, bytes);
  statistics_.num_device_alloc++;
  return block;
}

// Offset of the first byte behind all segments.
size_t CachingAllocator::place_of_segment(size_t bytes) {
  if (segments_.empty()) return kGuardBytes;
  auto [begin, last] = *segments_.rbegin();
  return begin - reinterpret_cast<uint64_t>(device_address(device_, 0)) + last.bytes + kGuardBytes;
}

void CachingAllocator::split(Block* block, size_t bytes) {
  auto* rest = new Block{block->begin + bytes, block->bytes - bytes, block->stream, block->small};
  rest->before = block;
  rest->after = block->after;
  if (rest->after) rest->after->before = rest;
  block->after = rest;
  block->bytes = bytes;
  pool(rest->small).insert(rest);
}

void CachingAllocator::free_data(void* data) {
  if (!data) return;
  if (is_in_bad_fork()) return;
  Lock lock;
  auto& self = allocator_at(data);
  auto found = self.in_use_.find(data);
  TORCH_INTERNAL_ASSERT(found != self.in_use_.end());
  self.free(found->second);
}

void CachingAllocator::free(Block* block) {
  in_use_.erase(block->begin);
  block->in_use = false;
  untouched_ -= std::exchange(block->untouched, false);
  count(statistics_.allocation, -1);
  count(statistics_.allocated_bytes, -static_cast<int64_t>(block->bytes));
  if (block->recorded.empty()) return release(block);
  trace().add("free_later", block->stream, "", 0, {bytes_of(*block)});
  for (int64_t stream : block->recorded) held_.push_back({scheduler().end_of(stream), block});
  block->pending = static_cast<int>(block->recorded.size());
}

// Releases blocks for which all streams that record_stream named have caught up. The allocator looks when it is asked
// for memory, as CUDA's does (`process_events`).
void CachingAllocator::release_caught_up() {
  for (auto held = held_.begin(); held != held_.end();) {
    auto [point, block] = *held;
    if (!scheduler().reached(point)) {
      ++held;
      continue;
    }
    held = held_.erase(held);
    if (--block->pending == 0) release(block);
  }
}

void CachingAllocator::release(Block* block) {
  trace().add("free", block->stream, "", 0, {bytes_of(*block)});
  count(statistics_.active, -1);
  count(statistics_.active_bytes, -static_cast<int64_t>(block->bytes));
  count(statistics_.requested_bytes, -static_cast<int64_t>(block->requested_bytes));
  block->recorded.clear();
  if (is_free(block->before)) {
    pool(block->small).erase(block->before);
    block = merge(block->before, block);
  }
  if (is_free(block->after)) {
    pool(block->small).erase(block->after);
    block = merge(block, block->after);
  }
  pool(block->small).insert(block);
}

Block* CachingAllocator::merge(Block* first, Block* second) {
  first->bytes += second->bytes;
  first->after = second->after;
  if (first->after) first->after->before = first;
  delete second;
  return first;
}

// Gives back segments of which nothing is in use. The device waits first, as CUDA's allocator does.
void CachingAllocator::empty_cache() {
  Lock lock;
  host_wait_device(device_);
  release_caught_up();
  for (Pool* pool : {&small_, &large_}) {
    for (auto entry = pool->begin(); entry != pool->end();) {
      Block* block = *entry;
      if (block->before || block->after) {
        ++entry;
        continue;
      }
      entry = pool->erase(entry);
      discard(block->begin, block->bytes);
      segments_.erase(reinterpret_cast<uint64_t>(block->begin));
      count(statistics_.segment, -1);
      count(statistics_.reserved_bytes, -static_cast<int64_t>(block->bytes));
      statistics_.num_device_free++;
      delete block;
    }
  }
}

void CachingAllocator::record_stream(const c10::DataPtr& data, int64_t stream) {
  Lock lock;
  auto found = in_use_.find(data.get());
  if (found == in_use_.end()) return; // nothing was allocated
  trace().add("record_stream", stream, "", 0, {bytes_of(*found->second)});
  if (stream != found->second->stream) found->second->recorded.insert(stream);
}

void CachingAllocator::poison(bool on) {
  poison_ = on;
}

// Poison is written by the stream that uses the block first, as only this one knows that the memory is its own. A
// handed-out block may still be read by others, which the first user has to wait for.
void CachingAllocator::before_use(const std::vector<Range>& ranges, int64_t stream) {
  if (!untouched_) return;
  for (const Range& range : ranges) {
    Block* block = block_at(range.begin);
    if (!block || !block->untouched) continue;
    block->untouched = false;
    --untouched_;
    char* begin = kernel_address(block->begin);
    scheduler().enqueue(
        stream, {"poison", [begin, bytes = block->bytes] { std::memset(begin, kPoison, bytes); }});
  }
}

Block* CachingAllocator::block_at(uint64_t address) const {
  auto next = in_use_.upper_bound(reinterpret_cast<void*>(address));
  if (next == in_use_.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return address < reinterpret_cast<uint64_t>(block->begin) + block->bytes ? block : nullptr;
}

std::vector<std::tuple<int64_t, size_t, uint64_t>> CachingAllocator::live() const {
  std::vector<std::tuple<int64_t, size_t, uint64_t>> all;
  for (const auto& [begin, block] : in_use_)
    if (!block->untouched)
      all.emplace_back(block->number, block->requested_bytes, digest(kernel_address(begin), block->requested_bytes));
  return all;
}

std::pair<int64_t, uint64_t> CachingAllocator::segment_of(uint64_t address) const {
  auto next = segments_.upper_bound(address);
  if (next == segments_.begin()) return {0, 0};
  auto [begin, segment] = *std::prev(next);
  return {segment.number, begin};
}

c10::DeleterFnPtr CachingAllocator::raw_deleter() const {
  return &free_data;
}

void CachingAllocator::copy_data(void* to, const void* from, size_t bytes) const {
  auto task = [to = kernel_address(to), from = kernel_address(from), bytes] { std::memcpy(to, from, bytes); };
  scheduler().enqueue(current_stream(device_), {"copy_data", task});
}

std::vector<SegmentSnapshot> CachingAllocator::snapshot() const {
  std::vector<SegmentSnapshot> all;
  for (const auto& [address, segment] : segments_) {
    all.push_back({address, segment.bytes, segment.first->stream, segment.first->small, {}});
    for (const Block* block = segment.first; block; block = block->after) all.back().blocks.push_back(*block);
  }
  return all;
}

size_t CachingAllocator::free_bytes() const {
  return kMemoryBytes - static_cast<size_t>(statistics_.reserved_bytes[0].current);
}

namespace {

class Allocators final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return allocator(current_device()).allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return allocator(0).raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    allocator_at(to).copy_data(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < device_count(); ++device) allocator(device).empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get()) allocator_at(data.get()).record_stream(data, number_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    return allocator(device).statistics();
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock;
    for (auto* statistic : totals(allocator(device).statistics())) statistic->reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock;
    for (auto* statistic : totals(allocator(device).statistics())) statistic->reset_peak();
  }
  // Overrides a function that c10::DeviceAllocator has since torch 2.10.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    Lock lock;
    return {allocator(device).free_bytes(), kMemoryBytes};
  }
};

} // namespace

CachingAllocator& allocator(int device) {
  static auto* instances = [] { // never destroyed: tensors outlive static objects
    auto* all = new std::vector<CachingAllocator*>;
    for (int each = 0; each < kMaxDevices; ++each) all->push_back(new CachingAllocator(each));
    return all;
  }();
  return *instances->at(device);
}

CachingAllocator& allocator_at(const void* address) {
  return allocator(device_at(address));
}

c10::DeviceAllocator& allocators() {
  static auto* instance = new Allocators;
  return *instance;
}

} // namespace sim
