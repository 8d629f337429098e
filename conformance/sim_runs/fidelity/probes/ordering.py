"""Probes of streams and events."""

from collections.abc import Mapping
from threading import Thread

import torch

from conformance.sim_runs.fidelity.probes.device_work import current_stream, new_stream, occupy, on, waits
from conformance.sim_runs.fidelity.rules import Fact

_POOL = 32


def _asynchronous_issue(device: torch.device) -> Mapping[str, Fact]:
    x = torch.ones(8, device=device)
    return {"the host waits": waits(device, lambda: x + 1)}


def _independent_streams(device: torch.device) -> Mapping[str, Fact]:
    torch.accelerator.synchronize(device)
    default, side, other = current_stream(device), new_stream(device), new_stream(device)
    facts: dict[str, Fact] = {}
    for name, first, second in (
        ("a stream waits for another", side, other),
        ("a stream waits for the default stream", default, side),
        ("the default stream waits for a stream", side, default),
    ):
        with on(second):
            x = torch.zeros((), device=device)
        second.synchronize()
        occupy(first)
        with on(second):
            x.fill_(1)
        second.synchronize()
        facts[name] = first.query()
        torch.accelerator.synchronize(device)
    return facts


def _waits_of_the_host(device: torch.device) -> Mapping[str, Fact]:
    first, second = new_stream(device), new_stream(device)
    occupy(first)
    pending = first.query()
    occupy(second)
    torch.accelerator.synchronize(device)
    return {
        "a busy stream is done": pending,
        "after the device all streams are done": first.query() and second.query(),
    }


def _events(device: torch.device) -> Mapping[str, Fact]:
    first, second = new_stream(device), new_stream(device)
    x = torch.zeros(8, device=device)
    torch.accelerator.synchronize(device)
    occupy(first)
    with on(first):
        x.fill_(1)
    event = first.record_event()
    early = event.query()
    second.wait_event(event)
    with on(second):
        y = x + 1
    second.synchronize()
    return {
        "done while its stream is busy": early,
        "work after a wait sees work before the record": y[0].item() == 2,
        "done when the waiting stream is": event.query(),
    }


def _event_recorded_again(device: torch.device) -> Mapping[str, Fact]:
    first, second, third = (new_stream(device) for _ in range(3))
    torch.accelerator.synchronize(device)
    event = torch.Event(device=device)
    event.record(first)
    second.wait_event(event)
    occupy(first)
    event.record(first)
    second.synchronize()
    earlier = first.query()
    third.wait_event(event)
    third.synchronize()
    return {"earlier waits are for the later point": earlier, "later waits are for the later point": first.query()}


def _event_never_recorded(device: torch.device) -> Mapping[str, Fact]:
    stream, other = new_stream(device), new_stream(device)
    torch.accelerator.synchronize(device)
    event = torch.Event(device=device)
    done = event.query()
    occupy(other)
    stream.wait_event(event)
    event.synchronize()
    stream.synchronize()
    held_up = other.query()
    other.synchronize()
    return {"done": done, "a wait is for other streams": held_up}


def _pool_of_streams(device: torch.device) -> Mapping[str, Fact]:
    ids = [new_stream(device).stream_id for _ in range(_POOL + 1)]
    return {"stream 33 is stream 1": ids[_POOL] == ids[0], "different streams among 32": len(set(ids[:_POOL]))}


def _current_stream_of_a_thread(device: torch.device) -> Mapping[str, Fact]:
    default, side = current_stream(device), new_stream(device)
    seen: list[torch.Stream] = []
    with on(side):
        thread = Thread(target=lambda: seen.append(current_stream(device)))
        thread.start()
        thread.join()
    return {"another thread issues on the default stream": seen == [default]}


PROBES = {
    "asynchronous-issue": _asynchronous_issue,
    "independent-streams": _independent_streams,
    "waits-of-the-host": _waits_of_the_host,
    "events": _events,
    "event-recorded-again": _event_recorded_again,
    "event-never-recorded": _event_never_recorded,
    "pool-of-streams": _pool_of_streams,
    "current-stream-of-a-thread": _current_stream_of_a_thread,
}
