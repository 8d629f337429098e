#include <Python.h>
#include <frameobject.h>
#include <torch/csrc/autograd/function.h>

#include "sites.h"

namespace sim {

namespace {

// Holds Python's lock. The device's lock comes first: whoever waits for that one has let go of Python's (lock.h).
struct Python {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Python() {
    PyGILState_Release(state);
  }
};

PyThreadState* thread_of(unsigned long id) {
  PyThreadState* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Main());
  while (thread && thread->thread_id != id) thread = PyThreadState_Next(thread);
  return thread;
}

std::string text_of(PyObject* string) {
  const char* text = PyUnicode_AsUTF8(string);
  return text ? text : "";
}

} // namespace

void Sites::start(std::vector<std::pair<std::string, Owner>> owners) {
  owners_ = std::move(owners);
  owner_of_.clear();
  main_thread_ = PyThread_get_thread_ident();
  is_on_ = true;
}

int64_t Sites::here() {
  if (!is_on_ || !Py_IsInitialized()) return 0;
  auto node = torch::autograd::get_current_node();
  std::string node_name = node ? node->name() : "";
  Python python;
  PyThreadState* thread = PyThreadState_Get();
  Frames frames = innermost(thread);
  if (!frames.program.first && thread->thread_id != main_thread_) {
    if (PyThreadState* main = thread_of(main_thread_)) frames.program = innermost(main).program;
  }
  auto [found, is_new] = numbers_.try_emplace({frames.program, frames.torch, node_name}, sites_.size() + 1);
  if (is_new) sites_.push_back({place_of(frames.program), place_of(frames.torch), node_name});
  return found->second;
}

Sites::Frames Sites::innermost(void* thread) {
  Frames found;
  PyFrameObject* frame = PyThreadState_GetFrame(static_cast<PyThreadState*>(thread));
  while (frame && !found.program.first) {
    auto* code = PyFrame_GetCode(frame);
    Owner owner = owner_of(code);
    Instruction& place = owner == Owner::kProgram ? found.program : found.torch;
    if (owner != Owner::kOther && !place.first) place = {code, PyFrame_GetLasti(frame)};
    Py_DECREF(code); // `owner_of` keeps a reference
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  return found;
}

Owner Sites::owner_of(Code code) {
  auto [found, is_new] = owner_of_.try_emplace(code, Owner::kProgram);
  if (!is_new) return found->second;
  auto* object = static_cast<PyCodeObject*>(code);
  Py_INCREF(object);
  std::string file = text_of(object->co_filename);
  size_t longest = 0;
  for (const auto& [begin, owner] : owners_) {
    if (begin.size() < longest || file.compare(0, begin.size(), begin) != 0) continue;
    longest = begin.size();
    found->second = owner;
  }
  return found->second;
}

Place Sites::place_of(Instruction instruction) {
  auto* code = static_cast<PyCodeObject*>(instruction.first);
  if (!code) return {};
  return {text_of(code->co_filename), PyCode_Addr2Line(code, instruction.second), text_of(code->co_name)};
}

Sites& sites() {
  static Sites* instance = new Sites; // never destroyed: tensors outlive static objects
  return *instance;
}

} // namespace sim
