"""Delays: which operators are delayed, and how often."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.instruments import delays as module
from conformance.instruments.delays import EVERY, KINDS, delays
from conformance.instruments.dispatch_tap import DispatchTap

OPERATORS = 100 * EVERY


def delayed(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, *, sleeps: bool = True) -> list[int]:
    """Return the numbers of those among many additions before which a rank on the CPU sleeps."""
    numbers: list[int] = []
    with monkeypatch.context() as patch, delays(kinds, device=torch.device("cpu"), sleeps=sleeps):
        for number in range(OPERATORS):
            patch.setattr("time.sleep", lambda _, number=number: numbers.append(number))
            torch.ones(2) + 1
    return numbers


@pytest.fixture
def additions_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kind", lambda func, *_: "copy" if func._schema.name == "aten::add" else None)


@pytest.mark.usefixtures("additions_are_copies")
def test_the_rank_that_sleeps_is_delayed_at_first_and_then_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = delayed(("copy",), monkeypatch)
    assert numbers[0] == 0
    assert OPERATORS / EVERY / 2 < len(numbers) < OPERATORS / EVERY * 2
    assert delayed(("copy",), monkeypatch) == numbers
    assert delayed(("copy",), monkeypatch, sleeps=False) == []
    assert delayed(("all_gather",), monkeypatch) == []


@pytest.mark.usefixtures("additions_are_copies")
@pytest.mark.parametrize("each_step", range(2, 17))
def test_each_operator_of_a_step_is_delayed_sometime(monkeypatch: pytest.MonkeyPatch, each_step: int) -> None:
    """Delays must not be in step with the operators of a training step, however many it has."""
    assert {number % each_step for number in delayed(("copy",), monkeypatch)} == set(range(each_step))


def operator(name: str) -> Any:
    return SimpleNamespace(namespace=name.partition("::")[0], _schema=SimpleNamespace(name=name))


def test_kinds_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._kind(operator("c10d::_allgather_base_"), (), {}) == "all_gather"
    assert module._kind(operator("_c10d_functional::all_reduce"), (), {}) == "all_reduce"
    assert module._kind(operator("c10d::send"), (), {}) == "transfer"
    assert module._kind(operator("c10d::recv_"), (), {}) == "transfer"
    assert module._kind(operator("c10d::barrier"), (), {}) not in KINDS
    assert delayed(KINDS, monkeypatch) == [], "an addition is of no kind"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: x.to("meta"), ["copy"]),
        (lambda x: x.to(torch.device("meta"), non_blocking=True), ["copy"]),
        (lambda x: x.to("meta", torch.bfloat16), ["copy"]),
        (lambda x: torch.empty(2, device="meta").copy_(x), ["copy"]),
        (lambda x: x.to(torch.bfloat16), []),
        (lambda x: x.to("cpu", copy=True), []),
        (lambda x: torch.empty(2).copy_(x), []),
    ],
)
def test_what_moves_a_tensor_to_another_device_is_a_copy(
    change: Callable[[Tensor], Tensor], expected: list[str]
) -> None:
    """Offloaded gradients are moved by `Tensor.to`, whose operator has one tensor among its arguments."""
    seen: list[str | None] = []

    def listen(func: Any) -> Any:
        return lambda args, kwargs: seen.append(module._kind(func, args, kwargs))

    with DispatchTap([], before=[listen]):
        change(torch.ones(2))
    assert [kind for kind in seen if kind] == expected


def test_a_torch_that_cannot_delay_a_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep", raising=False)
    with pytest.raises(RuntimeError, match=r"has no torch.cuda._sleep: see conformance/instruments/delays.py"):
        delays(KINDS, device=torch.device("cuda"), sleeps=True)
