#include "memory_map.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace sim {

namespace {

char* device_base = nullptr;
char* kernel_base = nullptr;
bool bad_fork = false;

constexpr size_t kAllBytes = kMaxDevices * kMemoryBytes;

char* map(int file, int protection) {
  void* base = mmap(nullptr, kAllBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(base != MAP_FAILED, "no addresses for the simulated device: ", std::strerror(errno));
  madvise(base, kAllBytes, MADV_DONTFORK); // a child that used them would write into its parent's tensors
  return static_cast<char*>(base);
}

} // namespace

void require_memory() {
  TORCH_CHECK(
      !bad_fork,
      "Cannot re-initialize the simulated device in forked subprocess. To use it with multiprocessing, you must use the "
      "'spawn' start method, or fork before the first tensor on the device");
}

void map_memory() {
  require_memory();
  if (kernel_base) return;
  int file = memfd_create("simulated-device", MFD_CLOEXEC);
  TORCH_CHECK(
      file >= 0 && ftruncate(file, kAllBytes) == 0,
      "no memory for the simulated device: ",
      std::strerror(errno));
  device_base = map(file, PROT_NONE);
  kernel_base = map(file, PROT_READ | PROT_WRITE);
  close(file);
  pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
}

bool is_in_bad_fork() {
  return bad_fork;
}

char* device_address(int device, size_t offset) {
  return device_base + device * kMemoryBytes + offset;
}

int device_at(const void* address) {
  return static_cast<int>((static_cast<const char*>(address) - device_base) / kMemoryBytes);
}

bool is_device_address(const void* address) {
  return device_base && address >= device_base && address < device_base + kAllBytes;
}

char* kernel_address(const void* device) {
  return device ? kernel_base + (static_cast<const char*>(device) - device_base) : nullptr;
}

void discard(const void* device, size_t bytes) {
  madvise(kernel_address(device), bytes, MADV_REMOVE);
}

} // namespace sim
