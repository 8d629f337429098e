// Progress of collectives while the host does something else.
#pragma once

namespace sim {

// Starts the thread that runs collectives which a schedule has left waiting while the host issued nothing for a second:
// it may wait for another rank by other means than the device, in a collective of gloo or at a store, and that rank for
// this one's device. A device goes on meanwhile.
void start_progress();

} // namespace sim
