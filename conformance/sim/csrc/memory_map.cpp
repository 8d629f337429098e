#include "memory_map.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace sim {

namespace {

char* device_base = nullptr;
char* kernel_base = nullptr;

char* map(int file, int protection) {
  void* base = mmap(nullptr, kMemoryBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(base != MAP_FAILED, "no addresses for the simulated device: ", std::strerror(errno));
  madvise(base, kMemoryBytes, MADV_DONTFORK); // a child that used them would write into its parent's tensors
  return static_cast<char*>(base);
}

} // namespace

void map_memory() {
  int file = memfd_create("simulated-device", MFD_CLOEXEC);
  TORCH_CHECK(
      file >= 0 && ftruncate(file, kMemoryBytes) == 0,
      "no memory for the simulated device: ",
      std::strerror(errno));
  device_base = map(file, PROT_NONE);
  kernel_base = map(file, PROT_READ | PROT_WRITE);
  close(file);
}

char* device_address(size_t offset) {
  return device_base + offset;
}

bool is_device_address(const void* address) {
  return address >= device_base && address < device_base + kMemoryBytes;
}

char* kernel_address(const void* device) {
  return device ? kernel_base + (static_cast<const char*>(device) - device_base) : nullptr;
}

void discard(const void* device, size_t bytes) {
  madvise(kernel_address(device), bytes, MADV_REMOVE);
}

} // namespace sim
