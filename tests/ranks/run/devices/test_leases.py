"""Leases: no device is used twice, no session starves, and a device outlives a session that dies."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.run.devices.leases import LeaseError, Leases, default_directory, processor_slots

GPUS = tuple(f"GPU-{number}" for number in range(8))
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def leases(tmp_path: Path) -> Leases:
    return Leases(GPUS, directory=tmp_path)


def test_all_or_nothing(leases: Leases) -> None:
    held = leases.take(5)
    assert len(set(held.slots)) == 5
    with pytest.raises(LeaseError, match=f"no 4 of .* within 0.05 s; held by: GPU-0: process {os.getpid()}, "):
        leases.take(4, limit_s=0.05)
    rest = leases.take(3)
    assert set(rest.slots) | set(held.slots) == set(GPUS)
    held.release()
    assert set(leases.take(5).slots) == set(held.slots)


@pytest.mark.parametrize("count", [0, 9, -1])
def test_more_than_there_is_cannot_be_waited_for(leases: Leases, count: int) -> None:
    with pytest.raises(ValueError, match=f"cannot lease {count} of 8 slots: GPU-0"):
        leases.take(count)


@pytest.mark.parametrize("slots", [["a", "a"], ["a/b"], [""], [".."]])
def test_slots_must_be_names(slots: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give each device one name"):
        Leases(slots, directory=tmp_path)


def take_and_note(leases: Leases, count: int, hold_s: float, log: list[tuple[str, float, str]]) -> None:
    lease = leases.take(count, limit_s=20.0)
    log.extend(("taken", time.monotonic(), slot) for slot in lease.slots)
    time.sleep(hold_s)
    log.extend(("free", time.monotonic(), slot) for slot in lease.slots)
    lease.release()


@settings(max_examples=15, deadline=None)
@given(wanted=st.lists(st.tuples(st.integers(1, 8), st.sampled_from([0.0, 0.01, 0.03])), min_size=2, max_size=8))
def test_no_slot_is_used_twice(tmp_path_factory: pytest.TempPathFactory, wanted: Sequence[tuple[int, float]]) -> None:
    leases = Leases(GPUS, directory=tmp_path_factory.mktemp("leases"))
    log: list[tuple[str, float, str]] = []
    threads = [threading.Thread(target=take_and_note, args=(leases, count, hold, log)) for count, hold in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(event == "taken" for event, _, _ in log) == sum(count for count, _ in wanted)
    for slot in GPUS:
        events = [event for event, _, its in sorted(log, key=lambda entry: entry[1]) if its == slot]
        assert events == ["taken", "free"] * (len(events) // 2)
    assert not leases.is_contended()


def test_who_asks_first_is_served_first(leases: Leases) -> None:
    """Narrow worlds would fit at once, but wait for the wide world before them."""
    held = leases.take(1)
    order: list[int] = []

    def ask(count: int) -> None:
        lease = leases.take(count, limit_s=20.0)
        order.append(count)
        lease.release()

    threads = []
    for count in (8, 1, 2):
        threads.append(threading.Thread(target=ask, args=(count,)))
        threads[-1].start()
        while len(list(leases._tickets())) < len(threads):
            time.sleep(0.001)
    assert leases.is_contended()
    time.sleep(0.05)
    assert order == []
    held.release()
    for thread in threads:
        thread.join()
    assert order[0] == 8


def test_slots_that_nobody_has_had_yet_are_held_by_nobody(leases: Leases) -> None:
    with leases._ticket(), pytest.raises(LeaseError, match="held by: nobody, but others wait longer"):
        leases.take(1, limit_s=0.0)


def test_leases_of_other_devices_do_not_wait(tmp_path: Path) -> None:
    """Sessions with other devices, such as CUDA_VISIBLE_DEVICES gives them, do not wait for each other."""
    ours, theirs = Leases(GPUS[:4], directory=tmp_path), Leases(GPUS[4:], directory=tmp_path)
    held = ours.take(4)
    waiting = threading.Thread(target=lambda: ours.take(1).release())
    waiting.start()
    while not ours.is_contended():
        time.sleep(0.001)
    assert not theirs.is_contended()
    theirs.take(4, limit_s=0.5).release()
    held.release()
    waiting.join()


def hold_for_ever(directory: Path, taken: Path, with_child: bool) -> None:
    lease = Leases(GPUS, directory=directory).take(8)
    if with_child and os.fork() == 0:
        taken.with_suffix(".child").write_text(str(os.getpid()))
        signal.pause()
    taken.write_text(str(lease.slots))
    signal.pause()


@pytest.mark.parametrize("with_child", [False, True])
def test_the_dead_hold_nothing_but_their_children_do(leases: Leases, tmp_path: Path, with_child: bool) -> None:
    taken = tmp_path / "taken"
    process = FORK.Process(target=hold_for_ever, args=(tmp_path, taken, with_child))
    process.start()
    while not taken.exists() or (with_child and not taken.with_suffix(".child").exists()):
        time.sleep(0.01)
    process.kill()
    process.join()
    if with_child:
        with pytest.raises(LeaseError):
            leases.take(1, limit_s=0.2)
        os.kill(int(taken.with_suffix(".child").read_text()), signal.SIGKILL)
    leases.take(8, limit_s=5.0).release()


def test_tickets_of_the_dead_are_removed(leases: Leases, tmp_path: Path) -> None:
    held = leases.take(8)
    process = FORK.Process(target=lambda: leases.take(1))
    process.start()
    while not leases.is_contended():
        time.sleep(0.001)
    process.kill()
    process.join()
    assert not leases.is_contended()
    assert list(tmp_path.glob("ticket-*")) == []
    held.release()


def test_the_directory_is_one_for_each_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CONFORMANCE_LEASE_DIR", str(tmp_path / "mine"))
    assert default_directory() == tmp_path / "mine"
    monkeypatch.delenv("CONFORMANCE_LEASE_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_directory().parent == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert default_directory().parent != tmp_path / "gone"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(os.getuid()) in default_directory().name
    assert Leases(["a"], directory=tmp_path / "new").slots == ("a",)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LeaseError, match="set CONFORMANCE_LEASE_DIR to a writable one"):
        Leases(["a"], directory=tmp_path / "file" / "below")


def test_processors_are_those_of_the_affinity_mask() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert processor_slots() == (f"cpu{min(allowed)}",)
    finally:
        os.sched_setaffinity(0, allowed)
