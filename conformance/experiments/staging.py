"""Staging for asynchronous saves: copies on the host of values that a device has still to compute."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import staging
from torch.distributed.tensor import DTensor, Shard

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.sharding import local
from conformance.run.experiment import Needs
from conformance.sim import device as simulated
from conformance.sim.schedules import Schedule

SCHEDULES = ("eager", "lazy", "random:1")
CALLS = 3
_ROWS, _WIDTH, _PRODUCTS = 8, 4096, 50
"""Numbers of rows of the state, and of products of square matrices that keep a GPU behind its host."""
_OPTIONS = ("use_pinned_memory", "use_async_staging", "use_non_blocking_copy")


@experiment(needs=Needs.SHARDING)
def staged_behind_the_device(rank: RankWorld) -> dict[str, list[str]]:
    """Stage a state three times, each time right after the host has issued its update.

    Returns what is wrong by stager, under all schedules of the simulated device. Requires torch 2.9 for
    `DefaultStager`.
    """
    faults: dict[str, list[str]] = {name: [] for name in stagers()}
    for schedule in _schedules(rank.device):
        for name, make in stagers().items():
            faults[name] += [f"{schedule}{fault}" for fault in _faults(make, rank)]
    return faults


def stagers() -> Mapping[str, Callable[[], staging.AsyncStager]]:
    """Return makers of stagers, by the options that are on."""

    def default(options: dict[str, bool]) -> Callable[[], staging.AsyncStager]:
        return lambda: staging.DefaultStager(staging.StagingOptions(use_shared_memory=False, **options))

    combinations = [dict(zip(_OPTIONS, values, strict=True)) for values in product((False, True), repeat=len(_OPTIONS))]
    return {
        "BlockingAsyncStager": staging.BlockingAsyncStager,
        "BlockingAsyncStager, cached": lambda: staging.BlockingAsyncStager(cache_staged_state_dict=True),
        **{", ".join(["DefaultStager", *filter(options.get, options)]): default(options) for options in combinations},
    }


def _schedules(device: torch.device) -> Iterator[str]:
    """Follow one schedule after the other on the simulated device, and yield their names."""
    if device.type != simulated.NAME:
        yield ""
        return
    for name in SCHEDULES:
        simulated.follow(Schedule.parse(name))
        yield f"{name}, "


def _faults(make: Callable[[], staging.AsyncStager], rank: RankWorld) -> Iterator[str]:
    sharded = DTensor.from_local(torch.zeros(_ROWS, device=rank.device), rank.mesh, [Shard(0)] * rank.mesh.ndim)
    plain = torch.zeros(_ROWS, device=rank.device)
    with closing(make()) as stager:
        for call in range(1, CALLS + 1):
            _occupy(rank.device)
            for tensor in (local(sharded), plain):
                tensor.add_(1)
            state: dict[str, Any] = {"sharded": sharded, "plain": plain}
            staged: Any = stager.stage(state)
            if isinstance(staged, Future):
                staged = staged.result()
            for key in state:
                copy: Tensor = local(staged[key])
                if copy.device.type != "cpu" or copy.tolist() != [call] * _ROWS:
                    yield f"call {call}: {key} is {copy.tolist()} on {copy.device}, expected {call}"


def _occupy(device: torch.device) -> None:
    """Give a GPU work, behind which the update waits; the simulated device waits by itself."""
    if device.type == "cuda":
        square = torch.ones(_WIDTH, _WIDTH, device=device)
        for _ in range(_PRODUCTS):
            torch.mm(square, square)
