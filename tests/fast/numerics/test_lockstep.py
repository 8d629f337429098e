"""Functions in lockstep meet, share contexts, and end together when one of them raises."""

from functools import partial
from threading import get_ident

import pytest

from conformance.numerics.lockstep import Lockstep, shared


def test_members_exchange_at_each_meeting() -> None:
    lockstep = Lockstep(3)

    def twice(member: int) -> tuple[int, str]:
        first = lockstep.meet(member, member, lambda given: list(reversed(given)))
        return first, lockstep.meet(member, 10 * first, lambda given: [str(sum(given))] * 3)

    assert lockstep.run([partial(twice, member) for member in range(3)]) == [(2, "30"), (1, "30"), (0, "30")]


def test_the_error_of_a_member_ends_all() -> None:
    lockstep = Lockstep(2)

    def fails() -> int:
        raise KeyError("not there")

    with pytest.raises(KeyError, match="not there"):
        lockstep.run([lambda: lockstep.meet(0, 1, list), fails])


def test_the_error_of_an_exchange_is_raised() -> None:
    def exchange(given: object) -> list[int]:
        raise ValueError(f"cannot exchange {given}")

    lockstep = Lockstep(2)
    with pytest.raises(ValueError, match=r"cannot exchange \[5, 6\]"):
        lockstep.run([lambda: lockstep.meet(0, 5, exchange), lambda: lockstep.meet(1, 6, exchange)])


def test_contexts_are_shared_while_they_are_open() -> None:
    entered: list[int] = []

    class Noting:
        def __enter__(self) -> None:
            entered.append(get_ident())

        def __exit__(self, *_error: object) -> None:
            return None

    with shared(Noting()):
        Lockstep(2).run([get_ident, get_ident])
    assert len(entered) == 3
    assert get_ident() in entered
    Lockstep(2).run([get_ident, get_ident])
    assert len(entered) == 3
