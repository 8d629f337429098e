"""Delays: which operators are late, and how often."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.instruments import delays as module
from conformance.instruments.delays import EVERY, KINDS, delays


def late(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, *, is_last: bool = True) -> int:
    """How often a rank on the CPU sleeps while it adds, and copies between two kinds of devices."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    with delays(kinds, device=torch.device("cpu"), is_last=is_last):
        for _ in range(EVERY + 1):
            torch.ones(2) + 1
    return len(slept)


def test_what_is_not_named_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late(KINDS, monkeypatch) == 0


@pytest.mark.parametrize(("is_last", "count"), [(True, 2), (False, 0)])
def test_one_of_several_is_late_on_the_last_rank(monkeypatch: pytest.MonkeyPatch, is_last: bool, count: int) -> None:
    monkeypatch.setattr(module, "_kind", lambda func, _: "copy" if func._schema.name == "aten::add" else None)
    assert late(("copy",), monkeypatch, is_last=is_last) == count
    assert late(("all_gather",), monkeypatch, is_last=is_last) == 0


def operator(name: str) -> Any:
    return SimpleNamespace(namespace=name.partition("::")[0], _schema=SimpleNamespace(name=name))


def test_kinds_of_operators() -> None:
    assert module._kind(operator("c10d::_allgather_base_"), ()) == "all_gather"
    assert module._kind(operator("_c10d_functional::all_reduce"), ()) == "all_reduce"
    assert module._kind(operator("aten::add"), ()) is None
    assert module._kind(operator("aten::copy_"), (torch.ones(1), torch.ones(1))) is None
    assert module._kind(operator("aten::copy_"), (torch.ones(1), torch.ones(1, device="meta"))) == "copy"


def test_a_torch_that_cannot_delay_a_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep", raising=False)
    with pytest.raises(RuntimeError, match=r"has no torch.cuda._sleep: see conformance/instruments/delays.py"):
        delays(KINDS, device=torch.device("cuda"), is_last=True)
