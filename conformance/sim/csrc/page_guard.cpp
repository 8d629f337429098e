#include "page_guard.h"

#include <signal.h>
#include <sys/mman.h>

#include <cerrno>
#include <map>

#include "lock.h"
#include "pinned.h"
#include "sites.h"

namespace sim {

namespace {

struct Page {
  int reads = 0, writes = 0; // by copies that have not run
  int seen = 0; // accesses of the host that are in the trace: 1, it read; 2, it wrote
};

std::map<uint64_t, Page>& pages() {
  static auto* instance = new std::map<uint64_t, Page>; // never destroyed: a fault may come late
  return *instance;
}

struct sigaction former;

void protect(uint64_t page, int protection) {
  mprotect(reinterpret_cast<void*>(page), kPageBytes, protection);
}

// The device's writes are in the way of all accesses of the host, its reads of the host's writes.
void protect(uint64_t page, const Page& state) {
  int writable = PROT_READ | PROT_WRITE;
  if (state.seen == 2 || !(state.reads || state.writes)) return protect(page, writable);
  protect(page, state.writes && !state.seen ? PROT_NONE : PROT_READ);
}

// The first fault of a page that nobody may touch counts as a read. If it was a write there is a second one.
bool note_access(uint64_t address) {
  int error = errno;
  Lock lock;
  auto found = pages().find(address / kPageBytes * kPageBytes);
  if (found == pages().end() || found->second.seen == 2) return false;
  auto& [page, state] = *found;
  bool writes = state.seen || !state.writes;
  state.seen = writes ? 2 : 1;
  protect(page, state);
  trace().add("host", -1, writes ? "host writes" : "host reads", 0, {{address, address + 1, writes}});
  errno = error;
  return true;
}

void on_fault(int number, siginfo_t* info, void* context) {
  if (note_access(reinterpret_cast<uint64_t>(info->si_addr))) return;
  if (former.sa_flags & SA_SIGINFO) return former.sa_sigaction(number, info, context);
  if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) return former.sa_handler(number);
  sigaction(SIGSEGV, &former, nullptr); // and the access faults again
}

// Others, such as `faulthandler`, may have installed a handler since the last time; it becomes the former one.
void handle_faults() {
  struct sigaction current;
  sigaction(SIGSEGV, nullptr, &current);
  if (current.sa_sigaction == on_fault) return;
  former = current;
  current = {};
  current.sa_sigaction = on_fault;
  current.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &current, nullptr);
}

template <class Change>
void for_each_page(const Range& range, Change change) {
  for (uint64_t page = range.begin / kPageBytes * kPageBytes; page < range.end; page += kPageBytes) change(page);
}

} // namespace

void guard_pages(const Range& range) {
  if (!sites().is_on()) return;
  handle_faults();
  for_each_page(range, [&](uint64_t page) {
    Page& state = pages()[page];
    ++(range.write ? state.writes : state.reads);
    state.seen = 0;
    protect(page, state);
  });
}

OpenPages::OpenPages(const Range& range) : range_(range) {
  for_each_page(range_, [](uint64_t page) {
    if (pages().count(page)) protect(page, PROT_READ | PROT_WRITE);
  });
}

OpenPages::~OpenPages() {
  for_each_page(range_, [&](uint64_t page) {
    auto found = pages().find(page);
    if (found == pages().end()) return;
    Page& state = found->second;
    --(range_.write ? state.writes : state.reads);
    protect(page, state);
    if (!state.reads && !state.writes) pages().erase(found);
  });
}

} // namespace sim
