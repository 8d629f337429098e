// What torch asks of a device: streams and events (guard), memory and generators (hooks).
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>

#include "allocator.h"
#include "device.h"
#include "generator.h"
#include "lock.h"
#include "memory_map.h"
#include "pinned.h"

namespace sim {

namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  int64_t number;
  Point point;
  std::shared_ptr<std::optional<Clock::time_point>> passed; // nothing without timing
};

int64_t events_ever = 0;
int devices = 1;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDeviceType;

  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return static_type;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_with(static_cast<c10::DeviceIndex>(exchange_device(device_with(device.index()).index())));
  }
  c10::Device getDevice() const override {
    return device_with(-1);
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device_with(device.index()).index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(devices);
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(current_stream(device_with(device.index()).index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    Lock lock;
    return stream_of(scheduler().default_stream(device_with(device.index()).index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock;
    return stream_of(scheduler().new_stream(device_with(device.index()).index()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(exchange_stream(number_of(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    int64_t number = number_of(stream);
    trace().add("query", number);
    return scheduler().query(scheduler().end_of(number));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait_stream(number_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    host_wait_device(device_with(index).index());
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    Lock lock;
    if (!*event) *event = new Event{};
    auto* recorded = static_cast<Event*>(*event);
    recorded->number = new_event();
    bool has_timing = flag == c10::EventFlag::BACKEND_DEFAULT;
    recorded->passed = has_timing ? std::make_shared<std::optional<Clock::time_point>>() : nullptr;
    std::function<void()> pass;
    if (has_timing) pass = [passed = recorded->passed] { *passed = Clock::now(); };
    recorded->point = scheduler().enqueue(number_of(stream), {"record", std::move(pass)});
    trace().add("record", number_of(stream), "", recorded->number);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Lock lock;
    auto* recorded = static_cast<Event*>(event);
    trace().add("wait", number_of(stream), "", recorded->number);
    scheduler().enqueue(number_of(stream), {"wait", nullptr, recorded->point});
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    if (!event) return true;
    auto* recorded = static_cast<Event*>(event);
    trace().add("query", recorded->point.stream, "", recorded->number);
    return scheduler().query(recorded->point);
  }
  void synchronizeEvent(void* event) const override {
    if (auto* recorded = static_cast<Event*>(event)) host_wait_event(recorded->point, recorded->number);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  // Milliseconds of the host's clock between the moments at which a schedule let the events pass. No model of a device's
  // speed stands behind them.
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    Lock lock;
    auto moment = [](void* event) {
      TORCH_CHECK(event, "Both events must be recorded before calculating elapsed time.");
      const auto& passed = static_cast<Event*>(event)->passed;
      TORCH_CHECK(passed, "Both events must be created with argument 'enable_timing=True'.");
      TORCH_CHECK(passed->has_value(), "Both events must be completed before calculating elapsed time.");
      return **passed;
    };
    return std::chrono::duration<double, std::milli>(moment(end) - moment(start)).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocators().recordStream(data, stream);
  }
#if __has_include(<c10/core/DeviceCapability.h>)
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {}; // all dtypes: the CPU's kernels have them
  }
#endif
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return !is_in_bad_fork();
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(devices);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    exchange_device(device_with(index).index());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device_with(index).index()));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? static_cast<c10::DeviceIndex>(-1) : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* address) const override {
    return pinned_memory().contains(address);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
  at::Device getDeviceFromPtr(void* address) const override {
    return device_with(static_cast<c10::DeviceIndex>(device_at(address)));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(device_with(index).index());
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(device_with(index).index());
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    Lock lock;
    auto data = allocator(device_with(storage.device().index()).index()).allocate(bytes);
    if (size_t kept = std::min(bytes, storage.nbytes())) {
      auto from = reinterpret_cast<uint64_t>(storage.data()), to = reinterpret_cast<uint64_t>(data.get());
      queue("resize", {{from, from + kept, false}, {to, to + kept, true}}, [=, to = data.get(), from = storage.data()] {
        std::memcpy(kernel_address(to), kernel_address(from), kept);
      });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

int device_of(const std::vector<Range>& ranges) {
  for (const Range& range : ranges) {
    auto* address = reinterpret_cast<void*>(range.begin);
    if (is_device_address(address)) return device_at(address);
  }
  return current_device();
}

} // namespace

int64_t new_event() {
  return ++events_ever;
}

void wait_for(int64_t waiting, int64_t other) {
  int64_t event = new_event();
  Point ready = scheduler().enqueue(other, {"record"});
  trace().add("record", other, "", event);
  trace().add("wait", waiting, "", event);
  scheduler().enqueue(waiting, {"wait", nullptr, ready});
}

Point queue(const std::string& name, std::vector<Range> ranges, std::function<void()> run, bool is_collective) {
  require_memory();
  int device = device_of(ranges);
  int64_t stream = current_stream(device);
  for (int each = 0; each < devices; ++each) allocator(each).before_use(ranges, stream);
  trace().add("op", stream, name, 0, std::move(ranges));
  return scheduler().enqueue(stream, {name, std::move(run), {}, is_collective, trace().number()});
}

int device_count() {
  return devices;
}

void use_devices(int count) {
  TORCH_CHECK(count >= 1 && count <= kMaxDevices, count, " simulated devices: from 1 to ", kMaxDevices);
  devices = count;
}

c10::Device device_with(c10::DeviceIndex index) {
  if (index < 0) index = static_cast<c10::DeviceIndex>(current_device());
  TORCH_CHECK(index < devices, "invalid device ordinal: sim:", static_cast<int>(index), " of ", devices, " device(s)");
  return c10::Device(kDeviceType, index);
}

c10::Stream stream_of(int64_t number) {
  Lock lock;
  int device = scheduler().device_of(number);
  bool is_default = number == scheduler().default_stream(device);
  return c10::Stream(
      c10::Stream::UNSAFE,
      c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)),
      is_default ? 0 : number);
}

int64_t number_of(const c10::Stream& stream) {
  Lock lock;
  return stream.id() ? stream.id() : scheduler().default_stream(stream.device_index());
}

void register_device() {
  c10::SetAllocator(kDeviceType, &allocators(), 0);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(kDeviceType, &pinned_memory());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace sim
