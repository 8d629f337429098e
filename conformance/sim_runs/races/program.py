"""Program of a process, as its trace shows it: operators by number, with the names of streams and the lines."""

from conformance.instruments.assignments import assigned_in
from conformance.instruments.happens_before import HOST
from conformance.sim.recorded import Place, Recorded, Site
from conformance.sim.trace import Access
from conformance.sim_runs.races.findings import Issued

_NOWHERE = Site(None, None, "")


class Program:
    """Trace of a process, with its streams and places."""

    def __init__(self, name: str, recorded: Recorded) -> None:
        self.name, self.recorded = name, recorded
        self.trace = recorded.trace
        self.positions = {entry.number: position for position, entry in enumerate(self.trace) if entry.number}
        """Position in the trace by number of the operator."""
        self._streams = {HOST: "host", 0: "default stream"}
        for entry in self.trace:
            if entry.kind == "stream":
                device = f" of device {entry.event}" if entry.event else ""
                self._streams[entry.stream] = (entry.name or self._name(entry)) + device

    def _name(self, created: Access) -> str:
        site = self.site(created)
        for place in (site.torch, site.program):
            if place and (name := assigned_in(place.file, place.line)):
                return name
        return f"stream {created.stream}"

    def site(self, entry: Access) -> Site:
        """Return where an entry of the trace was issued."""
        return self.recorded.sites[entry.site - 1] if entry.site else _NOWHERE

    def issued(self, position: int) -> Issued:
        """Return the operator at a position of the trace."""
        entry = self.trace[position]
        site = self.site(entry)
        stream = self._streams.get(entry.stream, f"stream {entry.stream}")
        return Issued(entry.number, entry.name, stream, site.program, site.torch, site.node)

    def operator(self, number: int) -> Issued:
        """Return the operator with a number."""
        return self.issued(self.positions[number])

    def queries(self) -> list[Place]:
        """Return the lines that ask whether a stream or an event is done."""
        places = [self.site(entry).program for entry in self.trace if entry.kind == "query"]
        return [place for place in dict.fromkeys(places) if place]
