"""Instrument of a subject's run on the simulated accelerator: its streams in all steps."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from conformance.experiments.device_streams import DeviceStreamTrace
from conformance.sim import device as simulated
from conformance.sim import schedules
from conformance.sim.schedules import Schedule
from conformance.subjects.facts import AcceleratorFacts
from reference_trainer.observer import Phase


class AcceleratorLog:
    """Streams of one rank's run under a schedule."""

    def __init__(self, device: torch.device, *, schedule: str, rank: int, last_step: int) -> None:
        """Let the device follow a schedule, by default the session's, before the run is built."""
        self._schedule = schedule or os.environ[schedules.VARIABLE]
        self._first_stream = torch.Stream(device=device).stream_id  # those of the run get the next numbers
        simulated.follow(Schedule.parse(self._schedule).for_rank(rank))
        self._last_step, self._has_ended = last_step, False
        self.trace = DeviceStreamTrace(last_step, reads_order=True)

    def phase(self, name: Phase, *, step: int) -> None:
        """Tell the phase that begins; streams are traced from the first step to the end of the last one."""
        self._has_ended = self._has_ended or (name, step) == ("idle", self._last_step)
        if self._has_ended:
            self.trace.end()
        else:
            self.trace.open()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Open a context for operators of the suite, whose waits order nothing."""
        with self.trace.unseen():
            yield

    def facts(self) -> AcceleratorFacts:
        """Return all that was seen; the run has ended."""
        busy = [stream - self._first_stream for stream in self.trace.busy_streams()]
        return AcceleratorFacts(
            schedule=self._schedule,
            busy_streams=[number for number in busy if number > 0],
            streams=self.trace.facts(),
        )
