"""A progress bar for loads and saves that take long."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from tqdm import tqdm

_DELAY_S = 2.0
"""What takes less shows no bar."""

T = TypeVar("T")


def progress(items: Sequence[T], *, title: str) -> Iterable[T]:
    """The items, and on rank 0's terminal how many of them are done."""
    return tqdm(items, desc=title, delay=_DELAY_S, disable=_quiet())


class LoadPlanner(DefaultLoadPlanner):
    """Counts the parts of tensors that this rank has read."""

    def __init__(self, *, title: str) -> None:
        super().__init__()
        self._title = title

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        self._bar = _bar(len(plan.items), self._title)
        return plan

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        super().commit_tensor(read_item, tensor)
        _count(self._bar)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        super().load_bytes(read_item, value)
        _count(self._bar)


class SavePlanner(DefaultSavePlanner):
    """Counts the parts of tensors that this rank has handed over for writing."""

    def __init__(self, *, title: str) -> None:
        super().__init__()
        self._title = title

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._bar = _bar(len(plan.items), self._title)
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        _count(self._bar)
        return data


def _bar(total: int, title: str) -> "tqdm[Any]":
    return tqdm(total=total, desc=title, delay=_DELAY_S, disable=_quiet())


def _count(bar: "tqdm[Any]") -> None:
    bar.update()
    if bar.n == bar.total:
        bar.close()


def _quiet() -> bool | None:
    """Of all ranks only the first shows a bar, and that on a terminal only (None)."""
    return True if dist.is_initialized() and dist.get_rank() != 0 else None
