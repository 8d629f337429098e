"""Objects in states that are saved, of which a copy is made in different ways, each with values of a time."""

import copy
import copyreg
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from conformance.sweeps.checkpoints import numbers


@dataclass
class Position:
    """Object with attributes, of which a copy is made by its dictionary."""

    epoch: int

    def next(self) -> int:
        """Return the next epoch."""
        return self.epoch + 1


@dataclass(slots=True)
class Cursor:
    """Object with slots and without a dictionary."""

    sample: int


@dataclass
class Copied:
    """Object that makes copies of itself."""

    seen: list[int]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Copied":
        return Copied(copy.deepcopy(self.seen, memo))


@dataclass
class Reduced:
    """Object that says how it is made, and gives the rest of its state apart."""

    seen: list[int]
    epoch: int = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, (self.seen,), {"epoch": self.epoch}


@dataclass
class Registered:
    """Object of a class for which a function is registered that says how it is made."""

    seen: list[int]


def _reduced(registered: Registered) -> tuple[Any, ...]:
    return Registered, (registered.seen,)


copyreg.pickle(Registered, _reduced)


@dataclass(eq=False)
class Called:
    """Object that holds a method of another one, and equals one that holds the method of an equal one."""

    back: Callable[[], int]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Called) and self.back() == other.back()


class Counter:
    """Object with a state dict, as the protocol `Stateful` asks for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and a tensor of it."""
        return {"count": self.count, "tensor": torch.tensor([self.count])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the count; raises ValueError if the tensor has another."""
        self.count = state_dict["count"]
        if state_dict["tensor"].tolist() != [self.count]:
            raise ValueError(f"the tensor is {state_dict['tensor']}, the count {self.count}")


def objects_of(time: int) -> dict[str, Any]:
    """Return objects of a time, and tensors with attributes or of one storage."""
    marked, both = numbers((2, 3), 10 * time + 7), numbers((4, 3), 10 * time + 8)
    marked.marks = [time]  # type: ignore[attr-defined]
    return {
        "position": Position(time),
        "cursor": Cursor(time),
        "recent": deque([time, time + 0.5]),
        "ordered": OrderedDict(first=numbers((2, 3), 10 * time + 6), second=time),
        "copied": Copied([time]),
        "reduced": Reduced([time], time),
        "registered": Registered([time]),
        "called": Called(Position(time).next),
        "power": partial_power(time),
        "marked": marked,
        "upper": both[:2],
        "lower": both[2:],
    }


def change_objects(state: Any) -> None:
    """Change the objects of a nested state in place, but those that hold functions."""
    for value in state.values() if isinstance(state, dict) else []:
        change_objects(value)
        if isinstance(value, (Copied, Reduced, Registered)):
            value.seen.append(-1)
        elif isinstance(value, Position):
            value.epoch = -1
        elif isinstance(value, Cursor):
            value.sample = -1
        elif isinstance(value, deque):
            value.append(-1)


@dataclass
class Power:
    """Object with a partial function, which takes its state after it is made."""

    function: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Power) and self.function() == other.function()


def partial_power(time: int) -> Power:
    """Return an object of a time whose partial function returns a power of two."""
    return Power(partial(pow, 2, time))
