"""Probes of collectives: in a world of one rank, and between two ranks, which `pair` starts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from conformance.sim.device import BACKENDS
from conformance.sim_runs.fidelity.probes.device_work import new_stream, occupy, settled
from conformance.sim_runs.fidelity.probes.pair import facts_of_two_ranks
from conformance.sim_runs.fidelity.rules import Fact

_NUMEL = 1024


@contextmanager
def _alone(device: torch.device) -> Iterator[torch.Stream]:
    """Open a context with a process group of one rank, on a settled stream."""
    backend = "nccl" if device.type == "cuda" else BACKENDS
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1, device=device))
        with settled(device) as stream:
            yield stream
    finally:
        dist.destroy_process_group()


def _lifetime(device: torch.device) -> Mapping[str, Fact]:
    with _alone(device) as stream:
        x = torch.ones(_NUMEL, device=device)
        address = x.data_ptr()
        work = dist.all_reduce(x, async_op=True)
        del x
        early = torch.empty(_NUMEL, device=device)
        work.wait()
        del work
        afterwards = torch.empty(_NUMEL, device=device)
        facts = {
            "handed out before the wait": early.data_ptr() == address,
            "handed out after the wait": afterwards.data_ptr() == address,
        }
        del early, afterwards
        x = torch.ones(_NUMEL, device=device)
        address = x.data_ptr()
        occupy(stream)
        dist.all_reduce(x)
        del x
        again = torch.empty(_NUMEL, device=device)
        return {**facts, "handed out after a synchronous one, at once": again.data_ptr() == address}


def _waits(device: torch.device) -> Mapping[str, Fact]:
    with _alone(device) as stream:
        x = torch.ones(_NUMEL, device=device)
        stream.synchronize()
        occupy(stream)
        work = dist.all_reduce(x, async_op=True)
        completed = work.is_completed()
        work.wait()
        waited = stream.query()
        dist.all_reduce(x)
        waited_in_call = stream.query()
        stream.synchronize()
        return {
            "the host waits in a collective": waited_in_call,
            "the host waits in wait()": waited,
            "completed while its input is not written": completed,
        }


def _barrier(device: torch.device) -> Mapping[str, Fact]:
    with _alone(device) as stream:
        other = new_stream(device)
        occupy(stream)
        occupy(other)
        dist.barrier()
        waited, others_done = stream.query(), other.query()
        torch.accelerator.synchronize(device)
        return {"the host waits for the current stream": waited, "other streams are done (free to either)": others_done}


PROBES = {
    "lifetime-of-tensors": _lifetime,
    "waits-for-collectives": _waits,
    "barrier": _barrier,
    "streams-of-collectives": facts_of_two_ranks,
}
