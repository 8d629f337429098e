"""Synchronisation of gradients that is given back as the judged code has set it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from conformance.instruments.gradient_sync import GradientSync


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, FSDPModule, bool]]:
    """Return the calls that reach torch's setters, each without recursion."""
    made: list[tuple[str, FSDPModule, bool]] = []
    for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):

        def setter(module: Any, value: bool, *, recurse: bool = True, name: str = name) -> None:
            reached = module.modules() if recurse else [module]
            made.extend((name, each, value) for each in reached if isinstance(each, FSDPModule))

        monkeypatch.setattr(FSDPModule, name, setter)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Any]:
    """Return a model with a layer, both of which FSDP has."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0])
    yield fully_shard(model)
    dist.destroy_process_group()


def values(calls: list[tuple[str, FSDPModule, bool]], module: FSDPModule) -> tuple[bool, bool]:
    """Return whether a module reduces, and all-reduces, after some calls."""
    sync, reduce = True, True
    for name, called, value in calls:
        if called is module:
            sync, reduce = (value, value) if name == "set_requires_gradient_sync" else (sync, value)
    return sync, reduce


def test_values_are_given_back(calls: list[tuple[str, FSDPModule, bool]], model: Any) -> None:
    sync = GradientSync()
    layer = model[0]
    with sync.listening():
        with sync.postponed(model):
            assert values(calls, model) == values(calls, layer) == (False, False)
        assert values(calls, model) == values(calls, layer) == (True, True)
        layer.set_requires_gradient_sync(False)
        model.set_requires_all_reduce(False, recurse=False)
        with sync.postponed(model):
            model.set_requires_gradient_sync(True, recurse=False)
            assert values(calls, model) == (True, True)
        assert values(calls, model) == (True, True)
        assert values(calls, layer) == (False, False)
        model.set_requires_gradient_sync(True)
        layer.set_requires_all_reduce(False)
        with sync.postponed(model):
            pass
        assert (values(calls, model), values(calls, layer)) == ((True, True), (True, False))


def test_nothing_is_postponed_unheard(model: Any) -> None:
    with pytest.raises(RuntimeError, match="while GRADIENT_SYNC is listening only"), GradientSync().postponed(model):
        pass
