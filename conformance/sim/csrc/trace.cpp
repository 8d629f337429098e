#include "trace.h"

#include <cstring>
#include <string_view>

#include "sites.h"

namespace sim {

namespace {

bool is_operator(const char* kind) {
  return !std::strcmp(kind, "op");
}

} // namespace

void Trace::start() {
  records_.clear();
  execution_ = {};
  on_ = true;
}

std::vector<Record> Trace::stop() {
  on_ = false;
  return std::exchange(records_, {});
}

void Trace::add(const char* kind, int64_t stream, std::string name, int64_t event, std::vector<Range> ranges) {
  int64_t number = is_operator(kind) ? ++operators_ : 0;
  if (on_) records_.push_back({kind, stream, std::move(name), event, std::move(ranges), number, sites().here()});
}

void Trace::runs(int64_t number) {
  if (on_) execution_.order.push_back(number);
}

void Trace::read(const void* bytes, size_t size) {
  if (on_) execution_.reads.push_back({execution_.order.back(), digest(bytes, size)});
}

Trace& trace() {
  static Trace* instance = new Trace; // never destroyed: tensors outlive static objects
  return *instance;
}

uint64_t digest(const void* bytes, size_t size) {
  return std::hash<std::string_view>()({static_cast<const char*>(bytes), size});
}

} // namespace sim
