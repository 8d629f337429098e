"""Options and methods of FSDP2, any three together: a covering array of small trainings, compared with one process."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from conformance.covering_arrays.combinations import Rule
from conformance.covering_arrays.covering import covering_rows
from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.option_training import DEFAULTS, OPTIONS, Options, differences
from conformance.experiments.trials import End, Ended, Swept, Trials, Wrong, tried_alone
from conformance.run.experiment import Needs
from reference_trainer.mesh import fsdp_mesh

SUSPECTS: tuple[Options, ...] = (
    {"mesh": "N x 1", "reshard": 2},
    # findings/columns_resharded_to_two_ranks.py
    {"placement": "columns", "reshard": 2},
    {"placement": "columns of matrices", "reshard": 2},
    {"mesh": "1 x N", "placement": "columns", "reshard": 2},
    {"mesh": "1 x N", "placement": "columns of matrices", "reshard": 2},
    {"divide factor": 8.0, "forced sums": False, "mesh": "own"},  # gloo cannot multiply
    {"divide factor": 8.0, "forced sums": False, "mesh": "1 x N"},
    {"mesh": "N x 1", "divide factor": 8.0, "forced sums": True},  # findings/divide_factor_of_one_shard.py
    # findings/unused_parameters_of_postponed_reduction.py
    {"parameters": "bf16", "sums": "fp32", "reduced": "last", "spare": "zeros"},
)
"""Options that some version of torch refuses or has wrong: tried first, since narrowing a row down takes long."""

_MAX_RULE = 6
"""Number of options of a subset that rows can be made without; with more it counts as tried."""


@experiment(needs=Needs.TRAINING)
def sweep(rank: RankWorld) -> Swept:
    """Train with every three values of different options, but for those that are refused."""
    return OptionSweep(rank).swept()


class OptionSweep:
    """Rows of a covering array that all ranks try; what is refused or wrong is narrowed down and left out from then on.

    A row with two options that refuse each other says nothing of the others: new rows try those.
    """

    def __init__(self, rank: RankWorld) -> None:
        self._rank = rank
        self._trials = meshes_of(rank)
        self._right: list[Options] = []
        self._excluded: list[Options] = []
        self._swept = Swept()

    def swept(self) -> Swept:
        """Return the outcome: the number of rows that are right, and what is refused or wrong."""
        if subsets := _named(tried_alone()):
            for subset in ({}, *subsets):
                self._judge(subset, self._ended(subset))
        else:
            self._try_all()
        self._swept.computed["options"] = len(self._right)
        return self._swept

    def _try_all(self) -> None:
        for subset in SUSPECTS:
            if not any(_has({**DEFAULTS, **subset}, excluded) for excluded in self._excluded):
                self._judge(subset, self._ended(subset))
        while rows := self._missing():
            for row in rows:
                if not any(_has(row, excluded) for excluded in self._excluded):
                    self._try(row)

    def _missing(self) -> list[dict[str, Any]]:
        """Return rows with what no right row has together; none if not even the defaults are right."""
        if not all(self._excluded):
            return []
        rules = [
            Rule(subset.keys(), partial(_has, subset=subset)) for subset in self._excluded if len(subset) <= _MAX_RULE
        ]
        tried = [*self._right, *(subset for subset in self._excluded if len(subset) > _MAX_RULE)]
        # On one rank: all would find the same rows, and share the processors for it.
        rows = covering_rows(OPTIONS, strength=3, rules=rules, given=tried, rounds=0) if self._rank.rank == 0 else []
        found = [rows]
        dist.broadcast_object_list(found)
        return found[0]

    def _try(self, row: Options) -> None:
        ended = self._ended(row)
        if ended.end is not End.RIGHT:
            subset = self._narrowed(row, ended.end)
            narrowed = self._ended(subset)
            if narrowed.end is ended.end:
                row, ended = subset, narrowed
        self._judge(row, ended)

    def _judge(self, subset: Options, ended: Ended) -> None:
        """Keep the outcome of a row, or of a subset of one."""
        self._swept.count(ended.outcome)
        if ended.end is End.RIGHT:
            self._right.append({**DEFAULTS, **subset})
            return
        self._excluded.append(subset)
        subject = ", ".join(_spelled(option, subset[option]) for option in OPTIONS if option in subset) or "no option"
        if ended.end is End.ERROR:
            self._swept.computed[subject], self._swept.refused[subject] = 0, 1
            self._swept.reasons[subject] = f"{ended.error!r:.200}"
        for fault, text in ended.faults.items():
            self._swept.wrong.append(Wrong(subject=subject, fault=fault, kind="options", cases=1, example=text))

    def _narrowed(self, row: Options, end: End | None) -> Options:
        """Return a smallest subset of a row that ends as the row does if all other options have their defaults.

        Options without which a subset would be right belong to it, in defaults as well: of those the row has its own
        values. Where ranks wait for each other, that takes too long.
        """
        subset = {option: value for option, value in row.items() if value != DEFAULTS[option]}
        for option in list(subset):
            fewer = {other: value for other, value in subset.items() if other != option}
            if self._ended(fewer).end is end:
                subset = fewer
        if end is None:
            return subset
        needed = {
            option: row[option]
            for option, (_, *others) in OPTIONS.items()
            if option not in subset and any(self._ended({**subset, option: value}).end is End.RIGHT for value in others)
        }
        return {**subset, **needed}

    def _ended(self, subset: Options) -> Ended:
        options = {**DEFAULTS, **subset}
        return self._trials[options["mesh"]].ended(partial(differences, self._rank, options))


def _spelled(option: str, value: Any) -> str:
    return f"{option} {value}"


def _named(subjects: Iterable[str]) -> list[Options]:
    """Return the options of each subject that names some; subjects of other sweeps are left out."""
    of_text = {_spelled(option, value): (option, value) for option, values in OPTIONS.items() for value in values}
    spelled = [subject.split(", ") for subject in sorted(subjects)]
    return [dict(of_text[text] for text in each) for each in spelled if of_text.keys() >= set(each)]


def meshes_of(rank: RankWorld) -> dict[str, Trials]:
    """Return trials on the cell's mesh, on replicas of one shard and on shards of one replica, by `mesh` of OPTIONS."""
    size, device = rank.mesh.size(), rank.device.type
    return {
        "own": Trials(fsdp_mesh(rank.mesh)),
        "N x 1": Trials(init_device_mesh(device, (size, 1))),
        "1 x N": Trials(init_device_mesh(device, (1, size))),
    }


def _has(row: Options, subset: Options) -> bool:
    return all(row[option] == value for option, value in subset.items())
