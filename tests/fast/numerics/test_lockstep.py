"""Functions in lockstep meet, share contexts, and end together when one of them raises."""

from functools import partial
from threading import get_ident

import pytest

from conformance.numerics.lockstep import Lockstep, shared


def test_members_exchange_at_each_meeting() -> None:
    lockstep = Lockstep[int](3, lambda given: list(reversed(given)))

    def twice(member: int) -> tuple[int, int]:
        first = lockstep.meet(member, member)
        return first, lockstep.meet(member, 10 * first)

    assert lockstep.run([partial(twice, member) for member in range(3)]) == [(2, 0), (1, 10), (0, 20)]


def test_the_error_of_a_member_ends_all() -> None:
    lockstep = Lockstep[int](2, list)

    def fails() -> int:
        raise KeyError("not there")

    with pytest.raises(KeyError, match="not there"):
        lockstep.run([lambda: lockstep.meet(0, 1), fails])


def test_the_error_of_an_exchange_is_raised() -> None:
    def exchange(given: object) -> list[int]:
        raise ValueError(f"cannot exchange {given}")

    lockstep = Lockstep[int](2, exchange)
    with pytest.raises(ValueError, match=r"cannot exchange \[5, 6\]"):
        lockstep.run([lambda: lockstep.meet(0, 5), lambda: lockstep.meet(1, 6)])


def test_contexts_are_shared_while_they_are_open() -> None:
    entered: list[int] = []

    class Noting:
        def __enter__(self) -> None:
            entered.append(get_ident())

        def __exit__(self, *_error: object) -> None:
            return None

    with shared(Noting()):
        Lockstep[int](2, list).run([get_ident, get_ident])
    assert len(entered) == 3
    assert get_ident() in entered
    Lockstep[int](2, list).run([get_ident, get_ident])
    assert len(entered) == 3
