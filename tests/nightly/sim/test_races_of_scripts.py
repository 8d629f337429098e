"""Scripts whose bits depend on a schedule without a race, that fail under one, or whose host orders accesses."""

from pathlib import Path

import pytest

from conformance.sim_runs.races.text import text
from tests.support.race_scripts import Script

ORDERED = """
import threading


def by_a_number(_):
    x = ones()
    side.wait_stream(main)
    with side:
        x.add_(1)
        scale = x.sum().item()  # waits
    return (x * scale).sum().item()


def in_a_thread(_):
    x, results = ones(), []
    ready, done = torch.Event(device="sim"), torch.Event(device="sim")
    ready.record()

    def work():
        stream = torch.Stream(device="sim")
        with stream:
            ready.wait()
            results.append(x * 3)
            done.record()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    done.wait()
    results[0].record_stream(main)
    return results.pop().sum().item()


CASES = [by_a_number, in_a_thread]
"""
ASKED = """
x = ones() * 2
done = torch.Event(device="sim")
done.record()
x = x + 1 if done.query() else x - 1  # asks
print(x.sum().item())
"""
RANDOM = """
torch.seed()
print(torch.randn(4).to("sim").sum().item())
"""
CHECKED = """
x = ones()
side.wait_stream(main)
with side:
    x.zero_()
assert (x + 1).sum().item() == 1000
"""


pytestmark = pytest.mark.usefixtures("compiled_device")


def test_waits_for_a_number_order_and_are_listed(tmp_path: Path) -> None:
    script = Script(tmp_path, ORDERED)
    exploration = script.explore(2)
    assert exploration.is_clean
    assert {script.mark(pair.wait) for pair in exploration.held_by_waits} == {"waits"}
    assert "no accesses are unordered: no legal schedule" in text(exploration)


def test_a_question_about_a_stream_changes_bits_without_a_pair(tmp_path: Path) -> None:
    script = Script(tmp_path, ASKED)
    exploration = script.explore(2)
    assert exploration.pairs == []
    assert [difference.kind for difference in exploration.runs[1].differences] == ["read"]
    assert [script.mark(place) for place in exploration.queries] == ["asks"]
    assert "no unordered pair explains it" in text(exploration)


def test_a_random_program_is_told(tmp_path: Path) -> None:
    exploration = Script(tmp_path, RANDOM).explore(2)
    assert [difference.kind for difference in exploration.nondeterministic] == ["read"]
    assert exploration.smallest is None
    assert "two eager runs differ" in text(exploration)


def test_a_program_that_fails_under_a_schedule(tmp_path: Path) -> None:
    exploration = Script(tmp_path, CHECKED).explore(2)
    assert [run.status for run in exploration.runs] == [0, 1]
    assert "AssertionError" in exploration.runs[1].ending
    assert not exploration.is_clean
