// Memory of the device: every byte is mapped twice.
//
// Tensors hold addresses of a mapping that nobody may touch (PROT_NONE): a host that dereferences one dies of SIGSEGV,
// as it would with an address of a GPU. Kernels of the device use the second mapping of the same bytes. All devices of a
// process lie in one mapping, one behind the other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sim {

constexpr int kPoison = 0xFF; // each byte of fresh memory: NaN in each floating-point dtype, -1 in integers
constexpr int kMaxDevices = 8;
constexpr size_t kMemoryBytes = size_t{1} << 36; // of each device: reserved addresses; pages exist once they are written

// Maps the memory unless this process has it.
void map_memory();

// Refuses a process that was forked from one whose memory was mapped: it has no bytes at these addresses.
void require_memory();

// Address that tensors hold for the byte at an offset in the memory of a device.
char* device_address(int device, size_t offset);

bool is_device_address(const void* address);

// Device that has this address.
int device_at(const void* address);

// True in a process that was forked from one whose memory was mapped.
bool is_in_bad_fork();

// Address by which a kernel reaches what a device address names; null for null.
char* kernel_address(const void* device);

// Gives the pages of a range back to the operating system; they read as zeros afterwards.
void discard(const void* device, size_t bytes);

} // namespace sim
