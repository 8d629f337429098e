"""Progress bar for long loads and saves."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from tqdm import tqdm

_DELAY_S = 2.0
"""Seconds before a bar is shown."""

T = TypeVar("T")


def progress(items: Sequence[T], *, title: str) -> Iterable[T]:
    """Return the items, and show their progress on rank 0's terminal."""
    return tqdm(items, desc=title, delay=_DELAY_S, disable=_quiet())


class LoadPlanner(DefaultLoadPlanner):
    """Planner that counts the shards which this rank has read."""

    def __init__(self, *, title: str) -> None:
        super().__init__()
        self._title = title

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Begin the bar with the number of shards in the plan."""
        plan = super().finish_plan(new_plan)
        self._bar = _bar(len(plan.items), self._title)
        return plan

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Count a shard that was read."""
        super().commit_tensor(read_item, tensor)
        _count(self._bar)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Count an object that was read."""
        super().load_bytes(read_item, value)
        _count(self._bar)


class SavePlanner(DefaultSavePlanner):
    """Planner that counts the shards which this rank has handed over for writing."""

    def __init__(self, *, title: str) -> None:
        super().__init__()
        self._title = title

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Begin the bar with the number of shards in the plan."""
        plan = super().finish_plan(new_plan)
        self._bar = _bar(len(plan.items), self._title)
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Count a shard, or an object, that is handed over."""
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
    """Return the option `disable`: only rank 0 shows a bar, and only on a terminal (None)."""
    return True if dist.is_initialized() and dist.get_rank() != 0 else None
