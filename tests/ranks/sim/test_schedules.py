"""Schedules that delay chosen operators, and progress of a device whose host asks it again and again."""

from collections.abc import Callable

import pytest
import torch

from conformance.sim import device
from conformance.sim.schedules import Schedule
from reference_trainer.checks import UsageError
from tests.support.simulated_processes import exit_code


def executed_after(schedule: str, work: Callable[[], object]) -> int:
    """Return the number of tasks that run while the host issues work under a schedule."""
    device.follow(Schedule.parse(schedule))
    before = int(device.counts()["executed"])
    work()
    executed = int(device.counts()["executed"]) - before
    torch.accelerator.synchronize()
    return executed


def chosen_operators_wait() -> None:
    """Operators behind the delayed one in its stream wait too, those of other streams do not."""
    side = torch.Stream(device="sim")
    x, y = torch.ones(4, device="sim"), torch.ones(4, device="sim")  # operators 1 and 2

    def add_twice() -> None:
        x.add_(1)
        with side:
            y.add_(1)
        x.add_(1)

    assert executed_after("delay:3-3", add_twice) == 1
    assert executed_after("delay:8-8", add_twice) == 2
    assert executed_after("delay:1-100", add_twice) == 0
    assert executed_after("delay:100-200", add_twice) == 3
    assert x.tolist() == [9] * 4


def a_waiting_stream_needs_the_delayed_operator_with_its_own_next_one() -> None:
    side = torch.Stream(device="sim")
    x = torch.ones(4, device="sim")  # operator 1
    device.follow(Schedule.parse("delay:2-2"))
    before = int(device.counts()["executed"])
    x.add_(1)
    side.wait_stream(torch.accelerator.current_stream())
    assert device.counts()["executed"] == before
    with side:
        x.mul_(3)
    assert device.counts()["executed"] == before + 2
    side.synchronize()
    assert x.tolist() == [6] * 4


def a_host_that_asks_sees_progress() -> None:
    device.follow(Schedule.parse("lazy"))
    x = torch.ones(4, device="sim") + 1
    done = torch.Event(device="sim")
    done.record()
    answers = [done.query() for _ in range(10)]
    assert answers == sorted(answers)
    assert (answers[0], answers[-1]) == (False, True)
    assert torch.accelerator.current_stream().query()
    assert x.tolist() == [2] * 4


@pytest.mark.parametrize(
    "check",
    [
        chosen_operators_wait,
        a_waiting_stream_needs_the_delayed_operator_with_its_own_next_one,
        a_host_that_asks_sees_progress,
    ],
    ids=lambda check: check.__name__,
)
def test_schedules(check: Callable[[], None]) -> None:
    assert exit_code(check) == 0


@pytest.mark.parametrize("text", ["delay", "delay:3", "delay:3-", "delay:-3", "lazy:3", "random", "starve:x", ""])
def test_an_unknown_schedule_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write eager, lazy, random:SEED, starve:NUMBER-OF-STREAM or delay:FIRST-LAST"):
        Schedule.parse(text)
    assert Schedule.parse("delay:3-17") == Schedule(4, 3, 17)
