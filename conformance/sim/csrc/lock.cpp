#include <Python.h>

#include <mutex>

#include "lock.h"

namespace sim {

namespace {
std::recursive_mutex device_mutex;
}

Lock::Lock() {
  if (device_mutex.try_lock()) return;
  WithoutPython others;
  device_mutex.lock();
}

Lock::~Lock() {
  device_mutex.unlock();
}

WithoutPython::WithoutPython() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}

WithoutPython::~WithoutPython() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

} // namespace sim
