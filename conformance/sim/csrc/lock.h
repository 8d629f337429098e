// One lock for all state of the device: operators come from the main thread and from autograd's thread of the device.
#pragma once

namespace sim {

// Holds the device's lock. Whoever has to wait for it lets go of Python's lock meanwhile: its holder may need that one.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

// Gives Python's lock to other threads while a kernel or a collective runs, if this thread has it.
class WithoutPython {
 public:
  WithoutPython();
  ~WithoutPython();
  WithoutPython(const WithoutPython&) = delete;
  WithoutPython& operator=(const WithoutPython&) = delete;

 private:
  void* state_;
};

} // namespace sim
