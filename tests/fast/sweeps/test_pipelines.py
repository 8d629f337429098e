"""Sweep of pipeline schedules: no parameter of torch is missing, and its numbers are exact."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from conformance.covering_arrays.covering import covering_rows
from conformance.sweeps.pipeline_stages import PlainPipeline
from conformance.sweeps.pipelines import OPTIONS, RULES, SCHEDULES, SUSPECTS, layout_of, stages_on

OPTIONS_OF = {
    "stage": "schedule",
    "stages": "stages_per_rank",
    "n_microbatches": "micro_batches",
    "args_chunk_spec": "chunk_specs",
    "kwargs_chunk_spec": "chunk_specs",
    "output_merge_spec": "chunk_specs",
    "args": "input_requires_grad",
    "target": "loss_fn",
    "loss_kwargs": "loss_fn",
    "submodule": "stage",
    "stage_index": "schedule",
    "num_stages": "stages_per_rank",
    "input_args": "metadata",
    "output_args": "metadata",
    "input_grads": "metadata",
    "output_grads": "metadata",
    "group": "schedule",
    "dw_builder": "stage",
    "get_mesh": "second_dim",
}
"""Options of the sweep by the parameter of a schedule, of its `step` and `eval`, or of a stage that they try,
unless it has their name.
"""
LEFT_OUT = {
    "self": "no option",
    "device": "the CPU",
}
"""Parameters without an option, with the reason."""
ROWS = covering_rows(OPTIONS, strength=2, rules=RULES, rounds=0)


def test_every_parameter_is_an_option_or_left_out_for_a_reason() -> None:
    callables: list[Any] = [*SCHEDULES.values(), PipelineStage]
    callables += [getattr(schedule, name) for schedule in SCHEDULES.values() for name in ("step", "eval")]
    names = {name for each in callables for name in inspect.signature(each).parameters}
    assert OPTIONS_OF.keys() | LEFT_OUT.keys() <= names
    assert {OPTIONS_OF.get(name, name) for name in names - LEFT_OUT.keys()} <= OPTIONS.keys()


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_stage_is_on_one_rank(ranks: int) -> None:
    for row in ROWS:
        layout = layout_of(row, ranks)
        stages = [stages_on(rank, row, layout) for rank in range(ranks)]
        assert sorted(itertools.chain(*stages)) == list(range(layout.stages))


def test_sums_are_exact_and_gradients_are_there() -> None:
    """Results in fp32 equal those in fp64; a gradient that is zero everywhere would show nothing."""
    for row in ROWS:
        if row["passed"] == "bf16" or row["loss_fn"] == "none":
            continue
        layout = layout_of(row, 2)
        single = PlainPipeline(layout, range(2), 0, row).call("step", 0)
        double = PlainPipeline(layout, range(2), 0, row, dtype=torch.float64).call("step", 0)
        for name, grad in single.gradients.items():
            wanted = double.gradients[name]
            assert (grad is None) == (wanted is None)
            assert grad is None or wanted is None or torch.equal(grad.double(), wanted)
            assert grad is None or grad.count_nonzero()


def test_suspects_are_options_that_rules_allow() -> None:
    for suspect in SUSPECTS:
        row = {name: suspect.get(name, values[0]) for name, values in OPTIONS.items()}
        assert all(row[name] in OPTIONS[name] for name in suspect)
        assert not any(rule.forbids(row) for rule in RULES)
