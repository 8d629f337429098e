// Pages of pinned memory that a copy will read or write, and that the host must leave alone until the copy has run.
//
// They are protected until then. A host that touches one too early stops at a fault, which goes into the trace with
// the line of the program, and then goes on. So every access is seen, also those of NumPy or of other threads. A copy that
// has run is past: only a schedule that delays it shows the access.
#pragma once

#include "trace.h"

namespace sim {

// Protects pinned bytes that a queued copy uses; does nothing while sites are not looked up.
void guard_pages(const Range& range);

// Opens the pages of a copy while it runs. Those that other copies will use are protected again afterwards.
class OpenPages {
 public:
  explicit OpenPages(const Range& range);
  ~OpenPages();
  OpenPages(const OpenPages&) = delete;
  OpenPages& operator=(const OpenPages&) = delete;

 private:
  Range range_;
};

} // namespace sim
