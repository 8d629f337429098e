"""Frozen parameters: the steps in which they train, and the reference of a run that freezes some of them."""

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from conformance.oracles.frozen import at_step, first_of_each, is_trained, trained
from conformance.oracles.reference import ReferenceRun, initial_model, learning_rate, reference_run
from conformance.oracles.schedule import fsdp_events, fsdp_groups, reduced_numels, shard_numels
from conformance.oracles.tp_schedule import local_shapes
from conformance.plan.cells import AxisValue, Cell
from reference_trainer.config import Frozen, TrainerConfig
from reference_trainer.frozen import freeze
from reference_trainer.parallel_dims import resolve_mesh

_CONFIG = TrainerConfig(frozen=(Frozen(names=r"layers\.0\..*", until=2), Frozen(names=r"layers\..*norm\..*")))


def test_the_first_entry_that_matches_decides() -> None:
    assert not is_trained("layers.0.ffn_norm.weight", _CONFIG, step=1)
    assert is_trained("layers.0.ffn_norm.weight", _CONFIG, step=2)
    assert is_trained("layers.0.ffn_norm.weight", _CONFIG)
    assert not is_trained("layers.1.ffn_norm.weight", _CONFIG)
    assert is_trained("norm.weight", _CONFIG, step=0)


def test_the_configuration_of_a_step_freezes_for_ever_what_is_frozen_in_it() -> None:
    names = dict.fromkeys(("layers.0.ffn_norm.weight", "layers.1.ffn_norm.weight", "norm.weight"), 0)
    for step in range(4):
        assert trained(names, at_step(_CONFIG, step)) == trained(names, _CONFIG, step=step)


def test_trainer_and_oracle_freeze_the_same() -> None:
    model = initial_model(Cell().config)
    for step in range(4):
        freeze(model, _CONFIG.frozen, step=step)
        required = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert required == trained(dict(model.named_parameters()), _CONFIG, step=step).keys()


def test_first_of_each_takes_the_earliest() -> None:
    assert first_of_each([{"a": 1}, {"a": 2, "b": 3}]) == {"a": 1, "b": 3}


def require_same_steps(
    run: ReferenceRun, config: TrainerConfig, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Step an optimizer of torch with the gradients of a run, and compare the parameters at the end."""
    for step, gradients in enumerate(run.gradients):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        optimizer.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), run.parameters[name], rtol=1e-9, atol=1e-12)


def test_one_process_steps_thawed_parameters_as_torch_does() -> None:
    config = Cell(mesh="dp1", frozen="thawed", clip=0.0).config
    run = reference_run(config, dtype=torch.float64)
    model = initial_model(config).double()
    parameters = dict(model.named_parameters())
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": options.weight_decay},
            {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(options.beta1, options.beta2),
        eps=options.eps,
    )
    assert run.gradients[0].keys() < run.gradients[1].keys() == parameters.keys()
    require_same_steps(run, config, parameters, optimizer)


def test_groups_that_are_frozen_are_gathered_and_not_reduced() -> None:
    config = Cell(mesh="dp2", frozen="block").config
    dims = resolve_mesh(config.mesh, world_size=2)
    shapes = local_shapes(config.model, tp=1, tp_rank=0)
    numels, reduced = (count(shapes, config, shards=2) for count in (shard_numels, reduced_numels))
    kinds = Counter(event.kind for event in fsdp_events(config, dims, numels, reduced))
    assert kinds == {"all_gather": 7, "reduce_scatter": 3}
    assert reduced == {group: numel for group, numel in numels.items() if group != "layers.0"}


@pytest.mark.parametrize(
    ("changes", "reduced"),
    [
        ({}, ["output", "layers.1", "layers.0"]),
        # Around the blocks only the norm trains, which computes after them: neither group's input has a gradient.
        ({"tied_embeddings": True}, ["layers.1", "output", "layers.0"]),
        # The first norm has the embedding's output alone, which has no gradient, as its block has.
        (
            {"precision": "bf16-mixed"},
            [
                *("output", "norm", "layers.1.ffn_norm", "layers.1.attention_norm", "layers.1"),
                *("layers.0.ffn_norm", "layers.0", "layers.0.attention_norm"),
            ],
        ),
    ],
)
def test_the_end_of_backward_leaves_groups_without_gradients_of_inputs(
    changes: dict[str, AxisValue], reduced: list[str]
) -> None:
    cell = Cell(mesh="dp2", frozen="embedding").but(**changes)
    dims = resolve_mesh(cell.config.mesh, world_size=2)
    shapes = local_shapes(cell.config.model, tp=1, tp_rank=0)
    sizes = shard_numels(shapes, cell.config, shards=2), reduced_numels(shapes, cell.config, shards=2)
    events = zip(fsdp_events(cell.config, dims, *sizes), fsdp_groups(cell.config, dims, *sizes), strict=True)
    assert [group for event, group in events if event.kind == "reduce_scatter"] == reduced
