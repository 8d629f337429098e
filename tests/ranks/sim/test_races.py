"""Races of scripts: unordered operators are named by their lines, and right twins are left alone."""

import re
import sys
from pathlib import Path

import msgspec
import pytest

from conformance.sim_runs.races.exploring import explore
from conformance.sim_runs.races.findings import Exploration
from conformance.sim_runs.races.text import text
from reference_trainer.checks import UsageError
from tests.support.race_scripts import Script

MISSING_WAIT = """
def missing_wait(right):
    x = ones()
    side.wait_stream(main)
    with side:
        x.add_(1)  # first
    if right:
        main.wait_stream(side)
    return (x * 2).sum().item()  # second


CASES = [missing_wait]
"""
LIFETIMES = """
def freed_too_early(right):
    x = ones()
    side.wait_stream(main)
    with side:
        y = x * 2  # used
    if right:
        x.record_stream(side)
    del x  # released
    z = torch.full((1000,), 5.0, device="sim")  # reused
    main.wait_stream(side)
    return (y + z).sum().item()


def pinned_read_early(right):
    host = torch.zeros(1000, pin_memory=True)
    host.copy_(ones(), non_blocking=True)  # copied
    if right:
        done = torch.Event(device="sim")
        done.record()
        done.synchronize()
    return host.numpy()[5]  # read


def pinned_written_early(right):
    host = torch.ones(1000, pin_memory=True)
    x = host.to("sim", non_blocking=True)  # sent
    if right:
        main.synchronize()
    host.fill_(7)  # written
    return x.sum().item()


def same_bits(right):
    x = torch.empty(1000, device="sim")
    side.wait_stream(main)
    x.fill_(1)  # here
    if right:
        side.wait_stream(main)
    with side:
        x.fill_(1)  # there
    main.wait_stream(side)
    return x.sum().item()


def backward_elsewhere(right):
    w = torch.ones(4, 4, device="sim", requires_grad=True)
    side.wait_stream(main)
    with side:
        (w @ w).relu().sum().backward()  # backward
    if right:
        main.wait_stream(side)
    gradient = w.grad * 2  # gradient
    main.wait_stream(side)
    return gradient.sum().item()


CASES = [freed_too_early, pinned_read_early, pinned_written_early, same_bits, backward_elsewhere]
"""
pytestmark = pytest.mark.usefixtures("compiled_device")


def test_a_missing_wait_is_named_with_the_smallest_schedule(tmp_path: Path) -> None:
    script = Script(tmp_path, MISSING_WAIT)
    exploration = script.explore(3)
    (pair,) = exploration.pairs
    assert script.marks(pair) == ("first", "second")
    assert (pair.first.stream, pair.second.stream) == ("side", "default stream")
    assert pair.inverted_under == ["lazy", "starve:1"]
    assert [bool(run.differences) for run in exploration.runs] == [False, True, True]
    (difference,) = exploration.runs[1].differences
    assert (difference.kind, difference.what, script.mark(difference.place)) == (
        "read",
        "item, number 1 of its line",
        "second",
    )
    assert exploration.smallest is not None
    (delayed,) = exploration.smallest.delayed
    assert script.mark(delayed.program) == "first"
    assert exploration.explained_by == [0]
    report = text(exploration)
    assert "aten::add" in report
    assert re.search(
        r"coverage: \d distinct orders of execution in 3 runs\n  2 distinct orders of the 1 unordered", report
    )
    assert msgspec.json.decode(msgspec.json.encode(exploration), type=Exploration) == exploration


def test_lifetimes_and_pinned_memory(tmp_path: Path) -> None:
    """Each case has a right twin, of which nothing is reported."""
    script = Script(tmp_path, LIFETIMES)
    exploration = script.explore(3)
    pairs = {script.marks(pair): pair for pair in exploration.pairs}
    assert pairs.keys() == {
        ("used", "reused"),
        ("copied", "read"),
        ("sent", "written"),
        ("here", "there"),
        ("backward", "gradient"),
    }
    assert len(pairs) == len(exploration.pairs)
    assert script.mark(pairs["used", "reused"].released) == "released"
    assert (pairs["copied", "read"].second.stream, pairs["sent", "written"].second.operator) == ("host", "host writes")
    assert pairs["backward", "gradient"].first.node.endswith("Backward0")
    assert pairs["here", "there"].inverted_under == [], "the checker alone finds it: all bits are equal"
    assert all("lazy" in pair.inverted_under for marks, pair in pairs.items() if marks != ("here", "there"))
    assert exploration.held_by_waits == []


def test_a_program_without_the_device_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('nothing')")
    with pytest.raises(UsageError, match=r"no process of .* ended and used the device:\nnothing"):
        explore([sys.executable, str(script)], 2)
