"""Knobs of torch: set for ranks and for oracles, over the settings of the process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance.numerics.knobs import pin_numerics, pinned_knobs, pinned_numerics
from conformance.oracles import plain_optimizer
from conformance.oracles.emulation import emulated_step
from conformance.oracles.initialisation import initial_weights
from conformance.oracles.plain_optimizer import Start, plain_updates
from conformance.plan.cells import Cell
from conformance.run.pool import Pools, Task

CONFIG = Cell(mesh="dp1").config


@pytest.fixture(autouse=True)
def everything_otherwise() -> Iterator[None]:
    """Set every knob of this process to another value than computing on the CPU or on a device needs."""
    with pinned_numerics("cpu"):
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("high")
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
        yield


@pytest.mark.parametrize("device", ["cpu", "cuda:0", torch.device("cuda", 1)])
def test_all_knobs_are_set_and_set_back(device: torch.device | str) -> None:
    assert not any(pinned_knobs(device).values())
    with pinned_numerics(device):
        assert all(pinned_knobs(device).values())
        deterministic = torch.are_deterministic_algorithms_enabled()
        assert deterministic == (torch.device(device).type == "cuda")
    assert not any(pinned_knobs(device).values())
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_knob_that_is_off_is_named() -> None:
    pin_numerics("cuda")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    assert [name for name, pinned in pinned_knobs("cuda").items() if not pinned] == ["bf16 sums in fp32"]


def test_the_emulation_computes_with_the_knobs_of_ranks() -> None:
    emulated = emulated_step(CONFIG, initial_weights(CONFIG), step=0)
    assert emulated.knobs.keys() == pinned_knobs("cpu").keys()
    assert all(emulated.knobs.values())


def test_the_optimizer_steps_with_the_knobs_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    build = plain_optimizer._optimizer

    def observed(*arguments: Any) -> torch.optim.Optimizer:
        seen.extend(pinned_knobs("cpu").values())
        return build(*arguments)

    monkeypatch.setattr(plain_optimizer, "_optimizer", observed)
    plain_updates(CONFIG, {"w": torch.ones(2)}, {0: {"w": torch.ones(2)}}, start=Start())
    assert seen
    assert all(seen)


def test_ranks_have_the_knobs(pools: Pools) -> None:
    task = Task("tests.support.pool_tasks:knobs", {})
    (first,) = pools.run(task, world_size=1, deadline_s=30)
    (second,) = pools.run(task, world_size=1, deadline_s=30)
    assert all(first.values())
    assert first == second, "those of a task before are set back"
