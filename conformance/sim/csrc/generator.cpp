#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "device.h"
#include "memory_map.h"

namespace sim {

namespace {

bool are_of_device = false;

constexpr uint64_t kNumbersPerOperator = 4; // a multiple of 4, as for Philox: ATen/cuda/CUDAGeneratorImpl.h

// The state is a seed and an offset, 8 bytes each, as that of CUDA's generator: DTensor moves the offset by itself
// (torch/distributed/tensor/_random.py).
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device)
      : GeneratorImpl(
            c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == sizeof(uint64_t) * 2, "the state of a simulated device's generator has 16 bytes");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, sizeof seed_);
    std::memcpy(&offset_, bytes + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({sizeof(uint64_t) * 2}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, sizeof seed_);
    std::memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }

  // Seed of the CPU's engine for the next operator: the seed itself at first, as if the CPU sampled.
  uint64_t next_engine_seed() {
    uint64_t mixed = seed_ ^ (offset_ * 0x9E3779B97F4A7C15u);
    offset_ += kNumbersPerOperator;
    return mixed;
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& generator_of_device(int device) {
  static auto* all = [] { // never destroyed, as all of the device
    auto* generators = new std::vector<at::Generator>;
    for (int each = 0; each < kMaxDevices; ++each) generators->push_back(new_generator(each));
    return generators;
  }();
  return all->at(device);
}

} // namespace

void use_generators_of_device(bool on) {
  are_of_device = on;
}

const at::Generator& default_generator(int device) {
  return are_of_device ? generator_of_device(device) : at::globalContext().defaultGenerator(at::kCPU);
}

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device);
}

std::optional<at::Generator> seeded_generator(const std::optional<at::Generator>& given, int device) {
  at::Generator chosen = given && given->defined() ? *given : default_generator(device);
  if (chosen.device().is_cpu()) {
    TORCH_CHECK(
        !are_of_device, "Expected a 'sim' device type for generator but found '", chosen.device().type(), "'");
    return std::nullopt;
  }
  std::lock_guard<std::mutex> lock(chosen.mutex());
  return at::detail::createCPUGenerator(static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->next_engine_seed());
}

} // namespace sim
