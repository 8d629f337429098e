"""Samples of the sweep of operators: all of them compute on full tensors, and one that does not is wrong."""

import warnings
from collections import Counter

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from conformance.sweeps.operator_samples import Size, sample, sizes
from conformance.sweeps.operator_sweep import _on_full_tensors, _try_size, plan_of
from conformance.sweeps.operator_table import samples
from conformance.sweeps.trials import Trials
from tests.support.one_rank import world_of_one_rank

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
            _try_size(trials, broken, size, layouts)
        swept = trials.swept
    (uneven, empty) = swept.wrong
    assert (uneven.name, empty.kind) == ("unflatten: full tensors of uneven shards", "empty shards")
    assert "RuntimeError" in uneven.example
    assert (swept.computed, swept.outcomes) == ({"unflatten": 0}, {"wrong": 2})
