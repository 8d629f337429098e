// Memory of the device: every byte is mapped twice.
//
// Tensors hold addresses of a mapping that nobody may touch (PROT_NONE): a host that dereferences one dies of SIGSEGV,
// as it would with an address of a GPU. Kernels of the device use the second mapping of the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sim {

constexpr int kPoison = 0xFF; // each byte of fresh memory: NaN in each floating-point dtype, -1 in integers
constexpr size_t kMemoryBytes = size_t{1} << 36; // reserved addresses; pages exist once they are written

// Maps the memory; to be called once in each process, after its last fork: children would share the bytes.
void map_memory();

// Address that tensors hold for the byte at an offset in the device's memory.
char* device_address(size_t offset);

bool is_device_address(const void* address);

// Address by which a kernel reaches what a device address names; null for null.
char* kernel_address(const void* device);

// Gives the pages of a range back to the operating system; they read as zeros afterwards.
void discard(const void* device, size_t bytes);

} // namespace sim
