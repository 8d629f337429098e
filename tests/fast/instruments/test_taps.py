"""Taps of a small model in one process: places, order, lines, and that they change no bit."""

import torch
from torch import Tensor, nn

from conformance.instruments.taps import Taps


class Residual(nn.Module):
    """Model with a residual around two layers, one of which it calls twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.twice(self.twice(self.first(x)))
        return y


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.autograd.backward(model(x).square().sum())
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_places_come_in_the_order_of_execution() -> None:
    model, taps = Residual(), Taps()
    taps.phase("forward", step=4)
    with taps.attached(model):
        gradients_of(model, torch.ones(2, 3))
    places = [(tap.module, tap.kind, tap.item, tap.call) for tap in taps.taps if tap.kind != "parameter"]
    assert places[:4] == [
        ("", "input", "0", 0),
        ("first", "input", "0", 0),
        ("first", "output", "0", 0),
        ("twice", "input", "0", 0),
    ]
    backward = [place for place in places if "gradient" in place[1] or "backward" in place[1]]
    assert backward[0] == ("", "output gradient", "0", 0)
    assert backward.index(("twice", "output gradient", "0", 1)) < backward.index(("twice", "output gradient", "0", 0))
    assert ("twice", "parameter gradient", "weight", 0) in places
    assert {tap.step for tap in taps.taps} == {4}
    assert taps.lines[taps.taps[1].called].function == "forward"


def test_taps_change_no_bit_and_leave_nothing_behind() -> None:
    model, x = Residual(), torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    plain, taps = gradients_of(model, x), Taps()
    taps.phase("forward", step=0)
    with taps.attached(model):
        tapped = gradients_of(model, x)
    count = len(taps.taps)
    assert all(torch.equal(a, b) for a, b in zip(plain, tapped, strict=True))
    gradients_of(model, x)
    assert len(taps.taps) == count > 0


def test_equal_tensors_have_one_number_and_kept_values_are_copies() -> None:
    model, taps = Residual(), Taps()
    taps.phase("forward", step=0)
    with taps.attached(model):
        x = torch.ones(2, 3, requires_grad=True)
        gradients_of(model, x)
    numbers = [tap.value for tap in taps.taps if tap.kind == "input" and tap.module in ("", "first")]
    assert len(set(numbers)) == 1
    with torch.no_grad():
        x.zero_()
    assert bool(taps.tensors[0].all())


def test_modules_outside_of_training_are_not_tapped() -> None:
    model, taps = Residual(), Taps()
    taps.phase("optimizer", step=0)
    with taps.attached(model), torch.no_grad():
        model(torch.ones(2, 3))
    assert not taps.taps
