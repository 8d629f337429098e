"""Loud faults: every collective interface called with an argument that differs on one rank, and how that ends.

`RECORDED_FILE` has the outcome of each call by version of torch; `python -m benchmarks.loud_faults --write` measures
those of the installed one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import torch
from tabulate import tabulate

from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from conformance.sweeps.odd_modules import CLIPPING_CALLS, FSDP_CALLS
from conformance.sweeps.odd_states import PIPELINE_CALLS, STATE_CALLS
from conformance.sweeps.odd_tensors import DTENSOR_CALLS
from conformance.sweeps.rank_trials import OddCall, OddWorld, Outcome, RankEnd, RankTrials, outcome_of
from conformance.torch_release import release

_ON_TWO_RANKS: Mapping[str, Mapping[str, OddCall]] = {
    "FSDP2": FSDP_CALLS,
    "clipping": CLIPPING_CALLS,
    "DTensor": DTENSOR_CALLS,
    "state dicts and checkpoints": STATE_CALLS,
    "pipelines": PIPELINE_CALLS,
}

_ON_FOUR_SHARDS = (
    "clip_grad_norm_: not called",
    "save: not called",
    "load: not called",
    "step: not called",
)
"""Calls that four ranks make in one group; the others end there as on two ranks."""
_ON_A_GRID = (
    "fully_shard: shard_placement_fn",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_requires_gradient_sync",
    "backward: not called",
    "clip_grad_norm_: norm_type inf",
    "clip_grad_norm_: not called",
    "distribute_tensor: shape",
    "distribute_tensor: not called",
    "redistribute: placements",
    "redistribute: not called",
    "full_tensor: not called",
    "from_local: rows of a shard, run_check=True",
    "operator: sum not called",
    "get_model_state_dict: full_state_dict",
    "set_model_state_dict: a key missing",
)
"""Calls of two ranks that share parameters, times two of tensor parallelism.

A group of DTensor's calls goes on where no later collective needs the other; gathers of another order are silent where
tensor parallelism makes their shards equally large.
"""


def _calls(chapters: Mapping[str, Mapping[str, OddCall]]) -> dict[str, OddCall]:
    return {name: call for chapter in chapters.values() for name, call in chapter.items()}


def _with_tensor_parallelism(call: OddCall) -> OddCall:
    def on_grid(world: OddWorld) -> Mapping[str, str]:
        gridded = replace(world, tp=2)
        gridded.grid.size()  # all ranks make its groups, also one that leaves the call out
        return call(gridded)

    return on_grid


def _on_four_ranks() -> dict[str, OddCall]:
    calls = _calls(_ON_TWO_RANKS)
    shards = {f"dp4, {name}": calls[name] for name in _ON_FOUR_SHARDS}
    return shards | {f"dp2-tp2, {name}": _with_tensor_parallelism(calls[name]) for name in _ON_A_GRID}


CHAPTERS = {**_ON_TWO_RANKS, "four ranks": _on_four_ranks()}
CALLS: Mapping[int, Mapping[str, OddCall]] = {2: _calls(_ON_TWO_RANKS), 4: CHAPTERS["four ranks"]}
"""Calls by the number of ranks that make them."""
RECORDED_FILE = Path(__file__).with_name("loud_faults.json")

Recorded = dict[str, dict[str, Outcome]]
"""Outcome by call, by version of torch."""


@cache
def recorded() -> Recorded:
    """Return the outcomes that were measured before; empty without the file."""
    return msgspec.json.decode(RECORDED_FILE.read_bytes(), type=Recorded) if RECORDED_FILE.exists() else {}


def recorded_of(version: str) -> Mapping[str, Outcome]:
    """Return the outcome of each call on the newest version up to this one that has it; or of the oldest version."""
    versions = sorted(recorded(), key=release)
    earlier = [each for each in versions if release(each) <= release(version)]
    return {call: outcome for each in earlier or versions[:1] for call, outcome in recorded()[each].items()}


class LoudFault(msgspec.Struct, frozen=True):
    """End of a call on each rank."""

    call: str
    recorded: Outcome
    """Worst outcome that is allowed."""
    ends: list[RankEnd]

    @property
    def outcome(self) -> Outcome:
        """Outcome on all ranks."""
        return outcome_of([each.end for each in self.ends])

    @property
    def is_worse(self) -> bool:
        """True if the outcome is worse than the recorded one."""
        return self.outcome.severity > self.recorded.severity


FEW = ("from_local: rows of a shard, run_check=True", "save: not called", "load: a key that was not saved")


@experiment(needs=Needs.TRAINING, process_group=False)
def call_with_an_odd_rank(rank: RankWorld) -> list[LoudFault]:
    """Make every call; with the default seed few that raise on all ranks, which takes no time limit."""
    known = recorded_of(torch.__version__)
    calls = CALLS[rank.size]
    if rank.subjects & calls.keys():
        calls = {name: call for name, call in calls.items() if name in rank.subjects}
    elif rank.size == 2 and not rank.config.seed:
        calls = {name: calls[name] for name in FEW}
    return made(RankTrials(rank.rank, rank.size, rank.directory), calls, known)


def made(trials: RankTrials, calls: Mapping[str, OddCall], known: Mapping[str, Outcome]) -> list[LoudFault]:
    """Return the ends of calls; one without a recorded outcome may end in any way."""
    found = []
    for number, (name, call) in enumerate(calls.items()):
        ends = trials.ended(number, call, no_worse_than=known.get(name, Outcome.LOUD))
        found.append(LoudFault(name, known.get(name, Outcome.WRONG), ends))
    return found


_INTRODUCTION = """# What happens if one rank calls otherwise than the others

Written by `python -m benchmarks.loud_faults --write`, on CPUs and gloo, for each version of torch. In each call one
argument differs on the last rank, or that rank leaves the call out; each takes place in fresh processes: four if
its chapter says so, else two. Right is what the same call gives with the arguments of rank 0 on all ranks. Law
LOUD-1 fails if an outcome becomes worse.

`raises on some ranks`: the others wait for them, or go on. `a process dies`: gloo ends one that gets more bytes than it
expects. `waits`: no rank raises, and some wait for a peer until a time limit. `a group goes on`: of four ranks two or
three come to an end, and the others do not. These four are one for the law: the same call has shown several of them.
`silent and wrong`: all ranks end."""


def markdown(versions: Recorded) -> str:
    """Return the page with all outcomes by chapter."""
    sections = [_INTRODUCTION, _counts(versions)]
    for chapter, calls in CHAPTERS.items():
        rows = [[name, *(str(outcomes.get(name, "")) for outcomes in versions.values())] for name in calls]
        sections += [f"## {chapter}", tabulate(rows, headers=["call: what differs", *versions], tablefmt="github")]
    return "\n\n".join(sections) + "\n"


def _counts(versions: Recorded) -> str:
    counts = {version: Counter(outcomes.values()) for version, outcomes in versions.items()}
    rows = [[outcome, *(each[outcome] for each in counts.values())] for outcome in Outcome]
    return tabulate(rows, headers=["calls by outcome", *versions], tablefmt="github")
