"""Facts about cells that stand in the report in addition to the verdicts: time of steps, and bytes on the wire.

Facts are derived from the records of a session; torch, which the controller never imports, is not needed. No verdict
rests on a fact.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from conformance.instruments.communication import Communication
from conformance.run.experiment import TRAINING
from conformance.run.record import RECORD_FILE, Header


class Collective(msgspec.Struct, frozen=True, array_like=True):
    """Collective of rank 0; a list in JSON, since a report has many."""

    phase: str
    kind: str
    group: str
    dtype: str
    nbytes: int
    """Bytes of rank 0's input."""


class CellFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about the first training run of a cell."""

    substrate: str
    losses: list[float | None]
    """Losses of all steps, in nats; None where a loss was not finite."""
    step_s: list[float]
    """Raw times of each step after the first, on the slowest rank, without the time that instruments took."""
    calibration_s: float
    """Time of a fixed piece of work at the end of the run, on the slowest rank: steps are compared relative to it."""
    tokens_per_s: float | None
    """Valid tokens of all ranks in the fastest of these steps; None for a run of one step."""
    schedule: list[Collective]
    """Collectives of rank 0 in the last step, in their order."""
    communication: Communication | None = None
    """Communication of rank 0 in the last step; None for a run of one step."""

    @property
    def wire_bytes(self) -> dict[str, int]:
        """Bytes of rank 0's inputs in the last step, by `KIND GROUP DTYPE` of the collective."""
        nbytes = Counter[str]()
        for sent in self.schedule:
            nbytes[f"{sent.kind} {sent.group} {sent.dtype}"] += sent.nbytes
        return dict(sorted(nbytes.items()))

    @property
    def collectives(self) -> dict[str, int]:
        """Number of collectives in the last step, by `PHASE KIND GROUP`."""
        counts = Counter(f"{sent.phase} {sent.kind} {sent.group}" for sent in self.schedule)
        return dict(sorted(counts.items()))


class _Step(msgspec.Struct):
    step: int
    loss: float | None
    valid_tokens: int


class _Collective(msgspec.Struct):
    step: int
    phase: str
    kind: str
    group: str
    nbytes: int
    dtype: str


class _Rank(msgspec.Struct):
    """Fields that are read of `recorder.RankFacts`."""

    steps: list[_Step]
    step_s: list[float]
    calibration_s: float
    collectives: list[_Collective]
    communication: Communication | None = None


class _Run(msgspec.Struct):
    """Fields that are read of `record.RecordFile`."""

    header: Header
    ranks: list[_Rank]
    failure: object = None


def cell_facts(records: Path, *, session: str) -> dict[str, CellFacts]:
    """Return the facts of all cells that a session has trained, by id; `records` is the directory of its records."""
    runs = sorted(_runs(records, session=session), key=lambda run: run.header.cell.id)
    return {run.header.cell.id: _facts(run) for run in runs}


def _runs(records: Path, *, session: str) -> Iterator[_Run]:
    for file in records.glob(f"*/{RECORD_FILE}"):
        run = msgspec.json.decode(file.read_bytes(), type=_Run)
        wanted = run.header.session == session and run.header.experiment == TRAINING and run.header.repeat == 0
        if wanted and run.failure is None and run.ranks:
            yield run


def _facts(run: _Run) -> CellFacts:
    slowest = [max(times) for times in zip(*(rank.step_s for rank in run.ranks), strict=True)]
    steps, last = run.ranks[0].steps, run.ranks[0].steps[-1].step
    rates = [step.valid_tokens / time_s for step, time_s in zip(steps, slowest, strict=True) if time_s > 0][1:]
    return CellFacts(
        substrate=run.header.substrate,
        losses=[step.loss for step in steps],
        step_s=[round(time_s, 6) for time_s in slowest[1:]],
        calibration_s=round(max(rank.calibration_s for rank in run.ranks), 6),
        tokens_per_s=round(max(rates), 1) if rates else None,
        schedule=[
            Collective(sent.phase, sent.kind, sent.group, sent.dtype, sent.nbytes)
            for sent in run.ranks[0].collectives
            if sent.step == last
        ],
        communication=run.ranks[0].communication,
    )
