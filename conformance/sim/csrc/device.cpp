// What torch asks of a device: streams and events (guard), memory and generators (hooks).
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <optional>

#include "allocator.h"
#include "device.h"
#include "lock.h"
#include "memory_map.h"
#include "pinned.h"

namespace sim {

namespace {

struct Event {
  int64_t number;
  Point point;
};

int64_t events_ever = 0;

c10::Stream stream_of(int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, number);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;

  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return static_type;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device) const override {
    return stream_of(current_stream());
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream_of(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock lock;
    return stream_of(scheduler().new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(exchange_stream(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    return scheduler().reached(scheduler().end_of(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait_stream(stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    host_wait_device();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (!*event) *event = new Event{};
    auto* recorded = static_cast<Event*>(*event);
    recorded->number = new_event();
    recorded->point = scheduler().enqueue(stream.id(), {"record"});
    trace().add("record", stream.id(), "", recorded->number);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Lock lock;
    auto* recorded = static_cast<Event*>(event);
    trace().add("wait", stream.id(), "", recorded->number);
    scheduler().enqueue(stream.id(), {"wait", nullptr, recorded->point});
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    return !event || scheduler().reached(static_cast<Event*>(event)->point);
  }
  void synchronizeEvent(void* event) const override {
    if (auto* recorded = static_cast<Event*>(event)) host_wait_event(recorded->point, recorded->number);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void* address) const override {
    return pinned_memory().contains(address);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return kDevice;
  }
  // Random numbers are those of the CPU, from its generator: runs on both can then be compared in every bit.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    Lock lock;
    auto data = allocator().allocate(bytes);
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

} // namespace

int64_t new_event() {
  return ++events_ever;
}

Point queue(const std::string& name, std::vector<Range> ranges, std::function<void()> run, bool is_collective) {
  allocator().before_use(ranges);
  trace().add("op", current_stream(), name, 0, std::move(ranges));
  return scheduler().enqueue(current_stream(), {name, std::move(run), {}, is_collective});
}

void register_device() {
  map_memory();
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator(), 0);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace sim
