"""torch's optimizer on plain tensors: the formulas of the reference, and a resumed run that goes on."""

import pytest
import torch

from conformance.oracles.plain_optimizer import Start, plain_updates
from conformance.oracles.reference import Tensors, replay_updates
from reference_trainer.config import ModelConfig, OptimizerConfig, TrainerConfig

OPTIMIZERS = [
    OptimizerConfig(name="adamw", lr=0.05, weight_decay=0.3, eps=1e-3, max_norm=0.0),
    OptimizerConfig(name="adamw", lr=0.05, weight_decay=0.3, eps=1e-3, max_norm=0.0, implementation="fused"),
    OptimizerConfig(name="sgd", lr=0.05, weight_decay=0.3, max_norm=0.0, momentum=0.9),
]
STEPS = range(4)


def config_of(optimizer: OptimizerConfig) -> TrainerConfig:
    return TrainerConfig(model=ModelConfig(), optimizer=optimizer, steps=len(STEPS))


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return a matrix, which decays, and a vector, which does not."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in {"w": (3, 5), "b": (5,)}.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: f"{each.name}-{each.implementation}")
def test_steps_are_those_of_the_formulas(optimizer: OptimizerConfig) -> None:
    config, initial, gradients = config_of(optimizer), tensors(0), {step: tensors(step + 1) for step in STEPS}
    expected = replay_updates(config, initial, gradients)
    plain = plain_updates(config, initial, gradients, start=Start())
    assert plain.keys() == {"parameter", *expected.optimizer_state}
    for kind, named in {"parameter": expected.parameters, **expected.optimizer_state}.items():
        torch.testing.assert_close(plain[kind], dict(named), check_dtype=False, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: f"{each.name}-{each.implementation}")
def test_a_resumed_run_goes_on_in_every_bit(optimizer: OptimizerConfig, dtype: torch.dtype) -> None:
    config, initial = config_of(optimizer), tensors(0, dtype)
    gradients = {step: tensors(step + 1, dtype) for step in STEPS}
    whole = plain_updates(config, initial, gradients, start=Start())
    first = plain_updates(config, initial, {step: gradients[step] for step in STEPS[:2]}, start=Start())
    halfway = first.pop("parameter")
    rest = {step: gradients[step] for step in STEPS[2:]}
    resumed = plain_updates(config, halfway, rest, start=Start(steps_taken=2, state=first))
    for kind, named in whole.items():
        for name, tensor in named.items():
            assert torch.equal(resumed[kind][name], tensor), (kind, name)


def test_an_optimizer_that_takes_no_step_has_no_state() -> None:
    initial = tensors(0)
    assert plain_updates(config_of(OPTIMIZERS[0]), initial, {}, start=Start()).keys() == {"parameter"}


def test_state_without_its_step_counter_changes_the_next_update() -> None:
    """AdamW corrects the moments' bias by the number of steps: a counter that starts again must not be forgiven."""
    config, initial = config_of(OPTIMIZERS[0]), tensors(0)
    state = plain_updates(config, initial, {0: tensors(1)}, start=Start())
    parameters = state.pop("parameter")
    after = [
        plain_updates(config, parameters, {1: tensors(2)}, start=Start(steps_taken, state))["parameter"]["w"]
        for steps_taken in (0, 1)
    ]
    assert not torch.equal(*after)
