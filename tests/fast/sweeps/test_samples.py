"""Samples of sweeps: operators and optimizers compute on plain tensors, and trials end as outcomes."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance.oracles.documented_optimizers import documented_steps
from conformance.outcomes import SweptOutcome
from conformance.sweeps.drawing import share_of
from conformance.sweeps.operator_samples import Size, sample, sizes
from conformance.sweeps.operator_sweep import _on_full_tensors, plan_of, try_size
from conformance.sweeps.operator_table import samples
from conformance.sweeps.optimizer_samples import IMPOSSIBLE, OptimizerSample, all_samples, optimizer_samples, optimizers
from conformance.sweeps.optimizers import Numbers, State
from conformance.sweeps.optimizers import _number as numbers_only
from conformance.sweeps.optimizers import stepped as on_plain_tensors
from conformance.sweeps.trials import Trials, select_samples
from tests.support.one_rank import world_of_one_rank

# Operators


SIZES: tuple[tuple[int, Size], ...] = ((2, "even"), (2, "uneven"), (3, "uneven"), (3, "empty"))
"""Numbers of shards and sizes that meshes try, see `plan_of`."""


def test_every_sample_computes_on_full_tensors_of_every_size() -> None:
    warnings.simplefilter("ignore")  # deprecations are not what is tested
    for each in samples():
        for shards, size in SIZES:
            letters = sizes(shards)[size]
            full = [x.numbers(letters, seed=index, dtype=each.dtype) for index, x in enumerate(each.arguments)]
            _on_full_tensors(each, full)


def test_names_of_samples_are_unique() -> None:
    assert Counter(each.name for each in samples()).most_common(1)[0][1] == 1


def test_a_sample_that_full_tensors_refuse_is_wrong() -> None:
    def misspelled(x: Tensor) -> Tensor:
        return torch.unflatten(x, 0, (7, 9))

    broken = sample("unflatten", misspelled, "a b")
    with world_of_one_rank():
        trials = Trials(init_device_mesh("cpu", (1,)))
        for size, layouts in plan_of(broken, trials.mesh).items():
            try_size(trials, broken, size, layouts)
        swept = trials.swept
    (uneven, empty) = swept.wrong
    assert (uneven.name, empty.kind) == ("unflatten: full tensors of uneven shards", "empty shards")
    assert "RuntimeError" in uneven.example
    assert (swept.computed, swept.outcomes) == ({"unflatten": 0}, {"wrong": 2})


# Optimizers


def test_each_optimizer_but_lbfgs_is_compared_with_its_documented_algorithm_and_each_option() -> None:
    square, without = np.ones((2, 2)), set()
    for each in optimizer_samples():
        options = {name: numbers_only(value) for name, value in each.options.items()}
        if documented_steps(each.make.__name__, square, [square], options) is None:
            without.add(each.make.__name__)
    assert without == {"LBFGS"}


USUAL = [sample for sample in optimizer_samples() if sample.is_usual]
ROWS = 6


def stepped(sample: OptimizerSample, rows: slice) -> State:
    """Return parameters and state of the rows of a matrix."""
    full = Numbers.of([(ROWS, 4)], sample, ranks=2)

    def cut(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x[rows] for x in tensors]

    return on_plain_tensors(sample, Numbers(cut(full.parameters), [*map(cut, full.gradients)]))


@pytest.mark.parametrize("sample", USUAL, ids=lambda sample: sample.name)
def test_an_optimizer_is_on_elements_if_halves_step_as_the_full_matrix(sample: OptimizerSample) -> None:
    states = [stepped(sample, rows) for rows in (slice(None), slice(0, ROWS // 2), slice(ROWS // 2, None))]
    full, first, second = (state["parameter 0"] for state in states)
    difference = (torch.cat([first, second]) - full).abs().max()
    assert difference <= 1e-6 if sample.is_elementwise else difference >= 1e-3


def test_every_optimizer_is_tried_with_every_implementation_and_option() -> None:
    names = {sample.name for sample in optimizer_samples()}
    assert {make.__name__ for make in optimizers()} - names == {"SparseAdam"}
    assert {"AdamW, fused, amsgrad", "SGD, foreach, nesterov", "Adam, tensor lr", "Muon, nesterov"} <= names
    assert {"LBFGS, line_search_fn", "ASGD, t0", "RMSprop, foreach, centered", "NAdam, maximize"} <= names


def test_steps_change_parameters() -> None:
    for each in USUAL:
        state = stepped(each, slice(None))
        assert not torch.equal(state["parameter 0"], Numbers.of([(ROWS, 4)], each, ranks=2).parameters[0])


def test_plain_tensors_are_refused_for_the_samples_that_are_said_to_be_impossible_alone() -> None:
    refused = set()
    for each in all_samples():
        try:
            stepped(each, slice(None))
        except (AssertionError, RuntimeError, ValueError):
            refused.add(each.name)
    assert refused == IMPOSSIBLE.keys()


# Trials


def test_a_sweep_without_the_subjects_tries_all() -> None:
    for subjects, selected in (((), ["mean", "sum"]), (("Muon",), ["mean", "sum"]), (("sum", "Muon"), ["sum"])):
        assert select_samples(["mean", "sum"], str, restricted_to=subjects) == selected


@pytest.mark.parametrize("seed", range(4))
def test_a_share_of_a_sweep_has_each_optimizer_and_all_that_there_is_time_for(seed: int) -> None:
    samples = list(optimizer_samples())
    few, more = (
        share_of(samples, lambda sample: [sample.make.__name__], share=share, seed=seed) for share in (0.01, 0.5)
    )
    assert len(few) == len({sample.make for sample in few}) == len({sample.make for sample in samples})
    assert len(more) == round(0.5 * len(samples))
    assert more == [sample for sample in samples if sample in more]


def test_a_share_is_that_of_the_seed() -> None:
    shares = [share_of(range(100), lambda _: [0], share=0.1, seed=seed) for seed in (0, 0, 1)]
    assert shares[0] == shares[1] != shares[2]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (TypeError("got an unexpected keyword argument 'timeout'"), "refused"),
        (RuntimeError("Operator aten.poll.default with timeout does not have a sharding strategy"), "refused"),
        (RuntimeError("Timeout waiting for key: default_pg/0//cpu//0/1 after 500 ms"), "wrong"),
        (RuntimeError("Connect timeout [127.0.0.1]:1234"), "wrong"),
        (RuntimeError("Timed out waiting 500ms for recv operation to complete"), "wrong"),
        (RuntimeError("Application timeout caused pair closure"), "wrong"),
        (RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), "wrong"),
        (RuntimeError("wait timeout after 500ms, keys: /0"), "wrong"),
    ],
)
def test_a_rank_that_has_waited_refuses_nothing(mesh: DeviceMesh, error: Exception, outcome: SweptOutcome) -> None:
    def call(_mesh: DeviceMesh) -> Mapping[str, str]:
        raise error

    trials = Trials(mesh)
    trials.attempt("mean", "Shard(0)", "mean of 3 x 4", call)
    assert trials.swept.outcomes == {outcome: 1}
