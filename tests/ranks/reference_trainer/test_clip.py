"""Clipping in one process, and in a world of two with all kinds of gradients."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from reference_trainer.clip import clip_gradients
from reference_trainer.config import TrainerConfig
from reference_trainer.mesh import backends, check_offload, init_process_group

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def two_parameters() -> list[nn.Parameter]:
    """Return a parameter with gradient (3, -4), one with gradient 12, and a third without gradient."""
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, -4.0]), torch.tensor([12.0])
    return parameters


@pytest.mark.parametrize(("max_norm", "factor"), [(0.0, 1.0), (26.0, 1.0), (6.5, 0.5)])
@pytest.mark.parametrize("wrap", [list, iter], ids=["list", "generator"])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping(
    max_norm: float, factor: float, wrap: Callable[[list[nn.Parameter]], list[nn.Parameter]], foreach: bool
) -> None:
    parameters = two_parameters()
    assert float(clip_gradients(wrap(parameters), max_norm=max_norm, foreach=foreach)) == 13.0
    torch.testing.assert_close(parameters[0].grad, torch.tensor([3.0, -4.0]) * factor, rtol=1e-6, atol=0)
    torch.testing.assert_close(parameters[1].grad, torch.tensor([12.0]) * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_nothing_to_clip(order: float) -> None:
    assert float(clip_gradients([nn.Parameter(torch.zeros(1))], max_norm=1.0, norm_type=order)) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_what_is_not_finite(tmp_path: Path, value: float, order: float) -> None:
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout_s=60.0)
    try:
        parameters = two_parameters()
        parameters[1].grad = torch.tensor([value])
        assert not clip_gradients(parameters, max_norm=0.0, norm_type=order).isfinite()
        with pytest.raises(RuntimeError, match=r"gradients are not finite: .*set optimizer.error_if_nonfinite=false"):
            clip_gradients(parameters, max_norm=1.0, norm_type=order, error_if_nonfinite=True)
        assert parameters[0].grad is not None
        assert parameters[0].grad.tolist() == [3.0, -4.0], "gradients were changed"
    finally:
        dist.destroy_process_group()


def test_backends() -> None:
    assert backends(CPU, cpu_tensors=True) == backends(CPU, cpu_tensors=False) == "gloo"
    assert backends(CUDA, cpu_tensors=False) == "nccl"
    assert backends(CUDA, cpu_tensors=True) == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(("backend", "allowed"), [("gloo", True), ("cpu:gloo,cuda:gloo", True), ("cuda:gloo", False)])
def test_offloading_needs_a_backend_for_the_cpu(tmp_path: Path, backend: str, allowed: bool) -> None:
    init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout_s=60.0)
    try:
        check_offload(TrainerConfig(), CPU)
        if allowed:
            check_offload(TrainerConfig(offload="cpu"), CPU)
        else:
            with pytest.raises(ValueError, match=r"\(cuda:gloo\) has no backend .*init_process_group\(\"cpu:gloo,cuda"):
                check_offload(TrainerConfig(offload="cpu"), CPU)
    finally:
        dist.destroy_process_group()


def test_memory_is_pinned_for_an_accelerator_only() -> None:
    with pytest.raises(ValueError, match="this run is on the CPU: set pin_memory=false"):
        check_offload(TrainerConfig(offload="cpu", pin_memory=True), CPU)
