"""First collective of a run that is out of its place, for laws on order, number, size or dtype of collectives.

The run is that with taps: its log of collectives is compared with `conformance.oracles.traffic`, stream by stream, and
the issuers of its collectives (`Taps.issuers`) name groups of FSDP and modules.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

from conformance.instruments.facts import UNKNOWN, Collective, RankFacts
from conformance.instruments.fsdp_state import ROOT
from conformance.localisation.ranks import Ranks
from conformance.localisation.traces import Trace
from conformance.localisation.walk import container
from conformance.oracles import pipeline
from conformance.oracles.frozen import at_step
from conformance.oracles.schedule import (
    Event,
    fsdp_groups,
    group_of,
    reduced_numels,
    shard_numels,
    unsharded_after_forward,
)
from conformance.oracles.tp_schedule import local_shapes
from conformance.oracles.traffic import step_events
from conformance.plan.cells import Cell
from conformance.report.location import Location
from conformance.run.record import Record
from reference_trainer.config import TrainerConfig
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh

Stream = Literal["FSDP", "tensor parallelism", "context parallelism", "clipping", "trainer"]
"""Origin of collectives whose order among each other is known."""
_STREAMS: tuple[Stream, ...] = get_args(Stream)
Edit = Literal["superfluous", "missing", "replaced"]
_DATA = ("dp_shard", "dp_replicate")
_TRAINING = ("data", "evaluate", "forward", "backward")
_NUMBER_OF_TOKENS = "int64"
"""Dtype of the only sum over data ranks in forward or before that FSDP does not issue."""


class Key(NamedTuple):
    """Facts that two collectives of a step have in common if they are the same one."""

    phase: str
    kind: str
    group: str
    numel: int
    dtype: str
    reduce_op: str | None
    during: str
    """In forward, for FSDP: the group that was entered last."""
    purpose: str
    """Group of FSDP that is gathered or reduced; empty for other collectives."""

    @property
    def what(self) -> tuple[str, str, str]:
        """Kind, ranks and group of FSDP, in which a collective may have another dtype, size or time."""
        return self.kind, self.group, self.purpose

    @property
    def noun(self) -> str:
        """Noun phrase for the collective."""
        whose = f" of group {self.purpose}" if self.purpose else f" of {self.numel} elements"
        return f"{self.kind} over {self.group}{whose}"


@dataclass(frozen=True)
class Misfit:
    """First difference between the collectives of a rank in a step and the expected ones."""

    rank: int
    step: int
    index: int
    """Index in the rank's log: of the wrong collective, or of the one before which one is missing."""
    stream: Stream
    issued: Key | None
    """Wrong collective; None if one is missing."""
    expected: Key | None
    """Collective that should be there; None if one is superfluous."""
    clause: str


def first_wrong_collective(cell: Cell, record: Record, ranks: Ranks, traces: Sequence[Trace]) -> Location | None:
    """Return the first collective that is out of place, or the first group that is unsharded when it should not be.

    `record` and `traces` are of the cell's run with taps.
    """
    found = _Schedules(cell, record, ranks, traces)
    return next(filter(None, (found.first_wrong_in(step) for step in record.steps)), None)


class _Schedules:
    def __init__(self, cell: Cell, record: Record, ranks: Ranks, traces: Sequence[Trace]) -> None:
        self._cell, self._record, self._ranks, self._traces = cell, record, ranks, traces
        self._config = cell.config
        self._dims = resolve_mesh(cell.config.mesh, world_size=cell.world_size)

    def first_wrong_in(self, step: int) -> Location | None:
        """Return the first wrong place of a step."""
        misfits = [misfit for facts in self._record.ranks for misfit in self._misfits(facts, step)]
        for phases, point in (
            (("data", "evaluate", "forward"), "after_forward"),
            (("backward",), "at_optimizer"),
            (("unscale", "clip", "optimizer", "idle"), "after_step"),
        ):
            early = [misfit for misfit in misfits if _phase(misfit) in phases]
            if early:
                return self._location(min(early, key=lambda misfit: misfit.index), early)
            unsharded = self._unsharded(step, point)
            if unsharded is not None:
                return unsharded
        return None

    def _misfits(self, facts: RankFacts, step: int) -> Iterator[Misfit]:
        """Yield the first misfit of each stream of a rank, in the order of execution."""
        expected, issued = self._expected(facts, step), self._issued(facts, step)
        first = [
            first_misfit(facts.rank, step, stream, issued[stream], expected[stream], ordered=self._is_ordered(stream))
            for stream in expected
        ]
        yield from sorted(filter(None, first), key=lambda misfit: misfit.index)

    def _is_ordered(self, stream: Stream) -> bool:
        return stream != "tensor parallelism" or self._config.mesh.pp == 1

    def _expected(self, facts: RankFacts, step: int) -> dict[Stream, list[Key]]:
        config, at = at_step(self._config, step), facts.mesh_coordinate
        tp_rank, pp_rank = at.get("tp", 0), at.get("pp", 0)
        streams: dict[Stream, list[Event]] = {stream: [] for stream in _STREAMS}
        for event in step_events(config, self._dims, tp_rank=tp_rank, pp_rank=pp_rank):
            streams[_stream(event, config)].append(event)
        groups = expected_groups(config, self._dims, tp_rank=tp_rank, pp_rank=pp_rank)
        named = self._names_groups(facts)
        purposes: dict[Stream, Sequence[str]] = {"FSDP": groups if named else [""] * len(groups)}
        return {
            stream: [
                _key(event, purpose, event.during)
                for event, purpose in zip(events, purposes.get(stream, [""] * len(events)), strict=True)
            ]
            for stream, events in streams.items()
        }

    def _names_groups(self, facts: RankFacts) -> bool:
        """Return whether the issuers of a rank's collectives of FSDP were seen."""
        trace = self._traces[facts.rank]
        return any(
            trace.issuers[i] for i, each in enumerate(facts.collectives) if _stream(each, self._config) == "FSDP"
        )

    def _issued(self, facts: RankFacts, step: int) -> dict[Stream, list[tuple[int, Key]]]:
        streams: dict[Stream, list[tuple[int, Key]]] = {stream: [] for stream in _STREAMS}
        trace, named = self._traces[facts.rank], self._names_groups(facts)
        for index, each in enumerate(facts.collectives):
            if each.step != step or _is_agreement_of_stages(each) or self._follows_routing(each):
                continue
            stream, purpose = _stream(each, self._config), ""
            if stream == "FSDP" and named:
                purpose = self._group(trace.issuers[index])
            during = self._group(each.during) if stream == "FSDP" else ""
            streams[stream].append((index, _key(each, purpose, during)))
        return streams

    def _follows_routing(self, each: Collective) -> bool:
        """Return whether ranks exchange rows of experts, or their numbers, which `step_events` leaves out."""
        return each.kind == "all_to_all" and self._config.mesh.ep > 1

    def _group(self, modules: str) -> str:
        """Return the oracle's name of the group with these modules; empty for none."""
        if modules == ROOT:
            return ROOT
        return group_of(f"{modules.rpartition(', ')[2]}.weight", self._config) if modules else ""

    def _location(self, first: Misfit, all_misfits: Sequence[Misfit]) -> Location:
        same = [
            m for m in all_misfits if (m.issued, m.expected, m.clause) == (first.issued, first.expected, first.clause)
        ]
        ranks = sorted({misfit.rank for misfit in same})
        key = first.issued or first.expected
        assert key is not None
        trace = self._traces[first.rank]
        code = trace.code(trace.issued[first.index]) if first.issued and first.index < len(trace.issued) else None
        around = _around(trace, first.index)
        name = key.purpose or (trace.issuers[first.index] if first.issued else "") or around.name
        if first.stream in ("clipping", "trainer"):
            name = ""
        return self._make(
            ranks,
            name,
            quantity=key.noun,
            step=first.step,
            equals=first.clause,
            collective=f"in {key.phase}{'' if first.stream in ('clipping', 'trainer') else around.clause}",
            issued=code,
        )

    def _unsharded(self, step: int, point: str) -> Location | None:
        """Return the first group that is unsharded at a point in time and should not be, or the reverse."""
        if point == "after_forward" and self._config.mesh.pp > 1:
            return None
        wrong: dict[int, tuple[str, bool]] = {}
        for facts in self._record.ranks:
            found = facts.unsharded.get(f"{step}/{point}", [])
            for name in facts.parameters:
                group = group_of(name, self._config)
                is_kept = point == "after_forward" and unsharded_after_forward(group, at_step(self._config, step))
                if (name in found) != is_kept:
                    wrong.setdefault(facts.rank, (group, name in found))
        if not wrong:
            return None
        group, is_unsharded = wrong[min(wrong)]
        states = ("is unsharded", "must be sharded") if is_unsharded else ("is sharded", "must be unsharded")
        ranks = [rank for rank, found in wrong.items() if found == (group, is_unsharded)]
        when = {
            "after_forward": "after forward",
            "at_optimizer": "when the optimizer steps",
            "after_step": "at the end of the step",
        }[point]
        equals = f"{states[0]} {when}, {states[1]}"
        return self._make(ranks, group, quantity=f"parameters of group {group}", step=step, equals=equals)

    def _make(self, ranks: list[int], name: str, **facts: Any) -> Location:
        modules: Mapping[str, str] = {path: kind for trace in self._traces for path, kind in trace.modules.items()}
        tree = {path: "wrong" if path == name else "right" for path in modules}
        about = {"family": "schedule", "stage": "schedule", "module_class": modules.get(name, ""), "tree": tree}
        return self._ranks.location(ranks, name=name, **about, **facts)


def expected_groups(config: TrainerConfig, dims: ParallelDims, *, tp_rank: int, pp_rank: int) -> list[str]:
    """Return the groups of a rank's collectives of FSDP in one step, in their order."""
    if dims.pp > 1:
        return pipeline.fsdp_groups(config, dims, pipeline.order(config, rank=pp_rank))
    shapes = local_shapes(config.model, tp=dims.tp, tp_rank=tp_rank)
    numels, reduced = (count(shapes, config, shards=dims.dp_shard) for count in (shard_numels, reduced_numels))
    return fsdp_groups(config, dims, numels, reduced)


def _stream(each: Event | Collective, config: TrainerConfig) -> Stream:
    if each.phase == "clip":
        return "clipping"
    if each.phase in _TRAINING and each.group.startswith(_DATA) and each.dtype != _NUMBER_OF_TOKENS:
        return "context parallelism" if _is_of_ring(each, config) else "FSDP"
    return "tensor parallelism" if each.phase in _TRAINING and each.group == "tp" else "trainer"


def _is_of_ring(each: Event | Collective, config: TrainerConfig) -> bool:
    return each.is_of_ring if isinstance(each, Event) else config.mesh.cp > 1 and not each.is_of_fsdp


def _is_agreement_of_stages(each: Collective) -> bool:
    """Return whether stages agree on shapes, as they do before their first step from torch 2.15 on."""
    return (each.phase, each.group, each.kind, each.dtype) == ("data", "pp", "all_reduce", "int32")


def _key(each: Event | Collective, purpose: str, during: str) -> Key:
    is_clip = each.phase == "clip"
    operation = each.reduce_op if is_clip and each.reduce_op != UNKNOWN else None
    during = during if each.phase == "forward" else ""
    return Key(each.phase, each.kind, each.group, each.numel, each.dtype, operation, during, purpose)


def _phase(misfit: Misfit) -> str:
    key = misfit.issued or misfit.expected
    assert key is not None
    return key.phase


def _with_purposes(keys: Sequence[Key], expected: Sequence[Key]) -> list[Key]:
    """Return keys with the purposes that are expected where none was seen: groups lack names at first."""
    named = []
    for key, other in zip_longest(keys, expected[: len(keys)]):
        agrees = other is not None and not key.purpose and key._replace(purpose=other.purpose) == other
        named.append(other if agrees else key)
    return named


def first_misfit(
    rank: int, step: int, stream: Stream, issued: Sequence[tuple[int, Key]], expected: Sequence[Key], *, ordered: bool
) -> Misfit | None:
    """Compare the collectives of a stream, each with its index in the rank's log, with the expected ones.

    None if they agree; without `ordered` number and size alone count.
    """
    keys = _with_purposes([key for _, key in issued], expected)
    if keys == list(expected):
        return None
    end = issued[-1][0] + 1 if issued else 0
    if not ordered:
        return _first_surplus(rank, step, stream, issued, expected, end)
    position = _common(keys, expected)
    index = issued[position][0] if position < len(issued) else end
    wrong = keys[position] if position < len(keys) else None
    due = expected[position] if position < len(expected) else None
    lengths = _lengths(stream, keys, expected)
    edit = _edit(keys[position:], expected[position:], len(keys) - len(expected))
    if wrong and due and Counter(keys) == Counter(expected):
        return Misfit(rank, step, index, stream, wrong, None, f"in another order, where {due.noun} is due")
    if wrong and due and edit == "replaced":
        return Misfit(rank, step, index, stream, wrong, due, _replaced(wrong, due) + lengths)
    if edit == "superfluous":
        return Misfit(rank, step, index, stream, wrong, None, f"superfluous{lengths}")
    return Misfit(rank, step, index, stream, None, due, f"missing{lengths}")


def _edit(issued: Sequence[Key], expected: Sequence[Key], surplus: int) -> Edit:
    """Return the edit after which most collectives agree.

    With a `surplus` of issued collectives the first one is superfluous, or differs in dtype, size or time; with a
    deficit the first expected one is missing, or was issued in another dtype, size or time.
    """
    if not issued or not expected:
        return "superfluous" if issued else "missing"
    if all(issued[0].what != key.what for key in expected):
        return "superfluous"  # such as the gather of a group that should be several
    is_same = issued[0].what == expected[0].what
    found: list[tuple[int, int, Edit]] = []
    if surplus == 0 or is_same:
        found.append((_common(issued[1:], expected[1:]), 0, "replaced"))
    for skipped in range(1, 1 + max(len(issued), len(expected))):
        if surplus >= 0:
            found.append((_common(issued[skipped:], expected), -skipped, "superfluous"))
        if surplus <= 0:
            found.append((_common(issued, expected[skipped:]), -skipped, "missing"))
    return max(found)[2]


def _common(issued: Sequence[Key], expected: Sequence[Key]) -> int:
    """Return the number of collectives at the front that agree."""
    pairs = enumerate(zip(issued, expected, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(issued), len(expected)))


def _lengths(stream: Stream, issued: Sequence[Key], expected: Sequence[Key]) -> str:
    if len(issued) == len(expected):
        return ""
    return f"; {len(issued)} collectives of {stream} in the step, expected {len(expected)}"


def _first_surplus(
    rank: int, step: int, stream: Stream, issued: Sequence[tuple[int, Key]], expected: Sequence[Key], end: int
) -> Misfit | None:
    left = Counter(expected)
    for index, key in issued:
        left[key] -= 1
        if left[key] < 0:
            return Misfit(rank, step, index, stream, key, None, "superfluous, or of another size or dtype")
    missing = next((key for key, count in left.items() if count > 0), None)
    return Misfit(rank, step, end, stream, None, missing, "missing") if missing else None


def _replaced(issued: Key, expected: Key) -> str:
    """Return a clause about a collective in place of another one."""
    if issued.what != expected.what:
        return f"in place of {expected.noun}"
    differences = [
        f"{word} {getattr(issued, name)}, expected {getattr(expected, name)}"
        for name, word in (
            ("dtype", "in"),
            ("reduce_op", "reduces by"),
            ("numel", "elements:"),
            ("phase", "issued in"),
            ("during", "issued when forward has entered"),
        )
        if getattr(issued, name) != getattr(expected, name) and getattr(expected, name) != ""
    ]
    return "; ".join(differences)


class _Around(NamedTuple):
    name: str
    clause: str


def _around(trace: Trace, index: int) -> _Around:
    """Return the module in which a collective of the log is issued, and a clause about the tensors around it."""
    taps = [tap for tap in trace.taps if not tap.kind.startswith("collective")]
    before = [tap for tap in taps if tap.collectives <= index]
    after = [tap for tap in taps if tap.collectives > index]
    if not before:
        return _Around("", "")
    last = before[-1]
    paths = [last.module, *([after[0].module] if after else [])]
    return _Around(container(paths), f", after the {last.kind} of {last.module or 'the model'}")
