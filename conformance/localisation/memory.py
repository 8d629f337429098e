"""Storages that a run holds and should not, for laws on memory, from one further run that knows its storages.

The run is the one that the law has judged, with `conformance.instruments.held_storages`. What FSDP holds is compared
with the memory model, buffer by buffer; of other storages none may outlast its step, and none of forward and backward
its backward.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from conformance.assertions.memory_bounds import SCALARS_BYTES, itemsize_bytes, sizes_of
from conformance.experiments.held_memory import (
    storages_of_building,
    storages_of_sampled_ranks,
    storages_on_ranks,
    storages_over_steps,
)
from conformance.experiments.without_fsdp import profile_stages_without_fsdp, profile_without_fsdp
from conformance.instruments.fsdp_state import ROOT
from conformance.instruments.held_storages import (
    GATHERED,
    GRADIENT,
    REDUCED,
    TO_ACCUMULATE,
    TO_REDUCE,
    UNSHARDED,
    HeldSite,
    Moment,
)
from conformance.oracles.initialisation import building_memory
from conformance.oracles.memory_model import group_numels, predict
from conformance.oracles.memory_walk import Usage
from conformance.oracles.schedule import entered, gradient_sync, group_of, groups, ranks_after_forward
from conformance.oracles.torch_versions import traits_of
from conformance.plan.cells import Cell
from conformance.report.location import Code, Location
from conformance.run.case_runs import CaseRuns
from conformance.run.experiment import Experiment, sampled_ranks

_BUFFERS = {
    "unsharded parameters": ((UNSHARDED,), ("U", "P")),
    "outputs of all-gathers": ((GATHERED,), ("A",)),
    "inputs of reduce-scatters": ((TO_REDUCE,), ("I",)),
    TO_ACCUMULATE: ((TO_ACCUMULATE,), ("L", "B", "last")),
    "reduced gradients": ((REDUCED, GRADIENT), ("O", "G", "partial")),
}
"""Purposes of storages, and the buffers of `oracles.memory_walk` that they are, by noun."""
_TRAINING = ("forward", "backward")
_AFTER_BACKWARD = ("clip", "optimizer", "idle")
_RECEIVES = "_make_tensor_from_meta"
"""Function of `torch.distributed.pipelining` that allocates receive buffers, in the first step, for all steps."""
_HALVES = "_autograd_grad_for_inputs"
"""Function of `torch.distributed.pipelining` whose gradients stay in some versions, which MEM-6 judges."""
_SCALES = "precompute_scales"
"""Function of the trainer that computes, after a step, the scales of weights that are gathered in the next one."""
_MODES = ("always", "default", "except-last", "never")
_OTHERS = "other storages"


@dataclass(frozen=True)
class Excess:
    """Storages of a rank that are alive at a moment and should not be."""

    rank: int
    moment: Moment
    noun: str
    sites: Sequence[HeldSite]
    allowed_bytes: int

    @property
    def identity(self) -> tuple[str, str, str, str, int]:
        """Facts that the excess has in common with that of another rank."""
        first = self.sites[0]
        return self.noun, self.moment.phase, self.moment.kind, first.file, first.line


def first_held(law: str, cell: Cell, runs: CaseRuns) -> Location | None:
    """Return the first storages that a run holds and should not; None if there are none.

    Raises CellFailed if the run does not finish.
    """
    if law == "INIT-6":
        return _location(cell, range(cell.world_size), _held_while_building(cell, runs))
    on_ranks = law in ("MEM-3", "MEM-10", "STREAM-2", "STREAM-4")
    ranks = range(cell.world_size) if on_ranks else sampled_ranks(cell.config, cell.world_size)
    experiment = storages_on_ranks if on_ranks else storages_of_sampled_ranks
    for each in _cells(law, cell):
        found = [*_held_in_second_step(each, runs, experiment, ranks)]
        found += [*_growth(each, runs, ranks)] if law == "MEM-6" and not found else []
        location = _location(each, ranks, found)
        if location is not None:
            return location
    return None


def _cells(law: str, cell: Cell) -> list[Cell]:
    """Return the cells of FSDP2 whose memory a law judges, on a case of a cell."""
    match law:
        case "MEM-4":
            return [cell, cell.but(reshard="always")]
        case "MEM-5":
            return [cell, cell.but(model="half")]
        case "MEM-7":
            return [cell.but(reshard=mode) for mode in _MODES]
        case _ if cell.implementation == "fsdp1":
            return [cell.but(implementation="fsdp2", limit_all_gathers=True)]
    return [cell]


def _held_in_second_step(
    cell: Cell, runs: CaseRuns, experiment: Experiment[list[Moment]], ranks: Sequence[int]
) -> Iterator[Excess]:
    """Yield the first excess of each rank in the second step."""
    for rank, moments in zip(ranks, runs.measure(experiment, cell), strict=True):
        allowed = _allowed(cell, runs, rank)
        judged = (m for i, m in enumerate(moments) if m.kind == "peak" or not _is_repeated(m, moments[i + 1 :]))
        found = ((moment, _excess(cell, moment, allowed, _stage(cell, rank))) for moment in judged)
        yield from itertools.islice((Excess(rank, moment, *excess) for moment, excess in found if excess), 1)


def _growth(cell: Cell, runs: CaseRuns, ranks: Sequence[int]) -> Iterator[Excess]:
    """Yield the storages of later steps that each rank still holds when the fiftieth is over."""
    for rank, moments in zip(ranks, runs.measure(storages_over_steps, cell), strict=True):
        second, fiftieth = [moment for moment in moments if (moment.phase, moment.kind) == ("idle", "rest")]
        more = [site for site in fiftieth.held if not site.purpose and site.step >= second.step]
        if more:
            line = more[0].file, more[0].line
            sites = sorted((s for s in more if (s.file, s.line) == line), key=lambda site: site.step)
            yield Excess(rank, fiftieth, _OTHERS, sites, 0)


def _held_while_building(cell: Cell, runs: CaseRuns) -> list[Excess]:
    found = []
    for rank, moments in enumerate(runs.measure(storages_of_building, cell)):
        rest, peak = moments[-1], max(moments, key=lambda moment: moment.nbytes)
        held_bytes = sum(site.nbytes for site in rest.held if site.purpose in ("parameter", "buffer"))
        _, most = building_memory(cell.config, held_bytes, on_device=False)
        others = [site for site in peak.held if not site.purpose]
        if peak.nbytes > most and others:
            found.append(Excess(rank, peak, _OTHERS, _largest_line(others), most - held_bytes))
    return found


def _is_repeated(moment: Moment, later: Sequence[Moment]) -> bool:
    """Return whether a phase comes again in a step, in another micro-batch: the model knows its last end alone."""
    return any((other.step, other.phase) == (moment.step, moment.phase) for other in later)


def _stage(cell: Cell, rank: int) -> int:
    """Return the coordinate of a rank in the pipeline; 0 without one."""
    return rank * cell.config.mesh.pp // cell.world_size


def _allowed(cell: Cell, runs: CaseRuns, rank: int) -> dict[str, Usage]:
    """Return the memory model of a rank, by phase."""
    stages, stage = cell.config.mesh.pp, _stage(cell, rank)
    if stages == 1:
        profile = runs.measure(profile_without_fsdp, cell)[0]
    else:
        profile = runs.measure(profile_stages_without_fsdp, cell)[0][stage]
    config, dims, shapes = sizes_of(cell, stage=stage)
    traits = traits_of(str(torch.__version__))
    return predict(config, dims, shapes, profile, traits=traits, shard_rank=dims.shard_rank(rank))


def _excess(
    cell: Cell, moment: Moment, allowed: dict[str, Usage], stage: int
) -> tuple[str, Sequence[HeldSite], int] | None:
    """Return noun, sites and allowed bytes of the storages that should not be alive at a moment; None without any."""
    usage = allowed.get(moment.phase, Usage() if moment.phase == "data" else None)
    for noun, (purposes, buffers) in _BUFFERS.items() if usage is not None else ():
        by_buffer = usage.most_by_buffer if moment.kind == "peak" else usage.end_by_buffer  # type: ignore[union-attr]
        limit = sum(by_buffer.get(buffer, 0) for buffer in buffers)
        if noun == TO_ACCUMULATE:
            limit += _accumulated_bytes(cell, moment, stage)
        sites = [site for site in moment.held if site.purpose in purposes]
        more = sum(site.nbytes for site in sites) - limit
        if more > SCALARS_BYTES:
            return noun, _most_distant(cell, moment, sites, more), limit
    left = [site for site in moment.held if not site.purpose and _should_be_gone(site, moment)]
    if sum(site.nbytes for site in left) > SCALARS_BYTES:
        return _OTHERS, _largest_line(left), 0
    return None


def _accumulated_bytes(cell: Cell, moment: Moment, stage: int) -> int:
    """Return the bytes of all unsharded gradients where their reduction is postponed to the last micro-batch.

    The memory model has them among the activations.
    """
    if gradient_sync(cell.config) == "each" or moment.phase not in _TRAINING:
        return 0
    return sum(group_numels(*sizes_of(cell, stage=stage)).values()) * itemsize_bytes(cell.config, "reduce")


def _should_be_gone(site: HeldSite, moment: Moment) -> bool:
    kept = {_RECEIVES, _SCALES, *([_HALVES] if traits_of(str(torch.__version__)).halves_keep_gradients else [])}
    if site.function in kept:
        return False
    if site.step < moment.step and site.phase != "build":
        return moment.phase != "data"  # the batch of the step before is replaced there
    return moment.phase in _AFTER_BACKWARD and site.phase in _TRAINING and moment.kind == "rest"


def _most_distant(cell: Cell, moment: Moment, sites: Sequence[HeldSite], nbytes: int) -> list[HeldSite]:
    """Return the storages of groups furthest from where the run is, which make up these bytes at least.

    Groups that the reshard mode keeps come last.
    """
    order = entered(groups(cell.config))
    at = _position(_oracle_name(cell, moment.group, is_parameter=False), order)

    def rank(site: HeldSite) -> tuple[bool, int]:
        name = group_name(cell, site)
        is_kept = name in order and ranks_after_forward(name, cell.config) != 0 and site.purpose == UNSHARDED
        return is_kept, -abs(_position(name, order) - at)

    ranked, sums = sorted(sites, key=rank), [0]
    for site in ranked:
        sums.append(sums[-1] + site.nbytes)
    chosen = [site for site, _ in itertools.takewhile(lambda pair: pair[1] < nbytes, zip(ranked, sums, strict=False))]
    return sorted(chosen, key=lambda site: _position(group_name(cell, site), order))


def _position(group: str, order: Sequence[str]) -> int:
    return order.index(group) if group in order else len(order)


def group_name(cell: Cell, site: HeldSite) -> str:
    """Return the oracle's name of the group to which storages of FSDP belong."""
    return _oracle_name(cell, site.place, is_parameter=site.purpose in (GRADIENT, TO_ACCUMULATE))


def _oracle_name(cell: Cell, place: str, *, is_parameter: bool) -> str:
    if place in ("", ROOT):
        return ROOT
    last = place.rpartition(", ")[2]
    return group_of(last if is_parameter else f"{last}.weight", cell.config)


def _largest_line(sites: Sequence[HeldSite]) -> list[HeldSite]:
    """Return the storages of the line whose storages are the largest in sum."""
    by_line: dict[tuple[str, int], list[HeldSite]] = {}
    for site in sites:
        by_line.setdefault((site.file, site.line), []).append(site)
    return max(by_line.values(), key=lambda own: sum(site.nbytes for site in own))


def _location(cell: Cell, ranks: Sequence[int], found: Sequence[Excess]) -> Location | None:
    if not found:
        return None
    first = found[0]
    same = sorted(excess.rank for excess in found if excess.identity == first.identity)
    site = first.sites[0]
    is_group = first.noun != _OTHERS
    places = list(dict.fromkeys(group_name(cell, s) if is_group else s.place for s in first.sites))
    count, nbytes = (sum(getattr(each, name) for each in first.sites) for name in ("count", "nbytes"))
    when = {"peak": f"at the peak of {first.moment.phase}", "rest": f"at the end of {first.moment.phase}"}
    steps = sorted({each.step for each in first.sites if each.step >= 0})
    return Location(
        case="",
        cell="",
        family="memory",
        stage="memory",
        name=places[0],
        quantity=f"{first.noun}{_groups_clause(places)}" if is_group else f"storages allocated by {site.operator}",
        step=first.moment.step if first.moment.step >= 0 else None,
        ranks=same,
        ranks_text=_ranks_text(same, ranks, cell.world_size),
        equals=f"{count} storages of {nbytes} bytes in sum, held {when[first.moment.kind]}, more than the "
        f"{first.allowed_bytes} bytes that are due",
        elements=f"allocated in {site.phase}{_allocation_steps(steps)}",
        called=Code(file=site.file, line=site.line, function=site.function),
    )


def _groups_clause(names: Sequence[str]) -> str:
    listed = ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"
    return f" of {'groups' if len(names) > 1 else 'group'} {listed}"


def _allocation_steps(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    return f" of step {steps[0]}" if len(steps) == 1 else f" of {len(steps)} steps, the first of which is {steps[0]}"


def _ranks_text(wrong: Sequence[int], ranks: Sequence[int], world_size: int) -> str:
    if len(wrong) == len(ranks):
        return "all ranks" if len(ranks) > 1 or world_size > 1 else "the only rank"
    return f"rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))} of {world_size}"
