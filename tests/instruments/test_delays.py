"""Delays: which operators are late, and how often."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.instruments import delays as module
from conformance.instruments.delays import EVERY, KINDS, delays

OPERATORS = 100 * EVERY


def late(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, *, is_last: bool = True) -> list[int]:
    """Before which of many additions a rank on the CPU sleeps."""
    slept: list[int] = []
    with monkeypatch.context() as patch, delays(kinds, device=torch.device("cpu"), is_last=is_last):
        for addition in range(OPERATORS):
            patch.setattr("time.sleep", lambda _, addition=addition: slept.append(addition))
            torch.ones(2) + 1
    return slept


def test_what_is_not_named_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late(KINDS, monkeypatch) == []


@pytest.fixture
def additions_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kind", lambda func, _: "copy" if func._schema.name == "aten::add" else None)


@pytest.mark.usefixtures("additions_are_copies")
def test_the_first_and_one_of_several_are_late_on_the_last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = late(("copy",), monkeypatch)
    assert found[0] == 0
    assert OPERATORS / EVERY / 2 < len(found) < OPERATORS / EVERY * 2
    assert late(("copy",), monkeypatch) == found
    assert late(("copy",), monkeypatch, is_last=False) == []
    assert late(("all_gather",), monkeypatch) == []


@pytest.mark.usefixtures("additions_are_copies")
@pytest.mark.parametrize("each_step", range(2, 17))
def test_each_operator_of_a_step_is_late_sometime(monkeypatch: pytest.MonkeyPatch, each_step: int) -> None:
    """Whatever the number of those in a step is: the same for all steps, it must not be in step with the delays."""
    assert {addition % each_step for addition in late(("copy",), monkeypatch)} == set(range(each_step))


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
