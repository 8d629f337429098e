"""TF32 without a CUDA device: the option is set or refused, products with rounded factors are within their bound."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.oracles import tolerance
from conformance.oracles.reference import Batch, Tensors, initial_model
from conformance.plan.cells import Cell
from conformance.run.ranks.process import reset_process_state
from reference_trainer.config import TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.mesh import check_device, set_tf32

CONFIG = Cell(mesh="dp1", tf32=True).config
CUDA = torch.device("cuda", 0)


def test_it_is_set_for_a_device_and_off_in_the_next_task() -> None:
    set_tf32(CONFIG, CUDA)
    assert torch.backends.cuda.matmul.allow_tf32
    reset_process_state()
    assert not torch.backends.cuda.matmul.allow_tf32
    set_tf32(CONFIG, torch.device("cpu"))
    assert not torch.backends.cuda.matmul.allow_tf32


def test_it_is_refused_on_the_cpu() -> None:
    check_device(CONFIG, CUDA)
    with pytest.raises(ValueError, match="this run is on device cpu: set tf32=false"):
        check_device(CONFIG, torch.device("cpu"))


def to_tf32(x: Tensor) -> Tensor:
    """Round fp64 numbers, of any shape, to the nearest with 10 + 1 bits; returns fp64."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0**11).round() / 2.0**11, exponent)


class RoundedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that rounds the factors of all products, in forward and backward, as a device with TF32 does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::bmm"):
            args = tuple(to_tf32(arg) for arg in args)
        elif func._schema.name == "aten::addmm":
            args = (args[0], *(to_tf32(arg) for arg in args[1:]))
        return func(*args, **(kwargs or {}))


def gradients(config: TrainerConfig, batch: Batch, context: Callable[[], Any]) -> Tensors:
    """Return the gradients of the mean loss in fp64, with attention made of products that the mode sees."""
    model = initial_model(config).double()
    parameters = dict(model.named_parameters())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), context():
        logits = model(batch[0]).flatten(0, 1)
        loss = F.cross_entropy(logits, batch[1].flatten(), ignore_index=IGNORED_LABEL)
        return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rounded_products_are_within_the_bound_and_outside_that_of_fp32(seed: int) -> None:
    config = Cell(mesh="dp1", tf32=True, seed=seed).config
    batch = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed).global_batch(0)
    exact, rounded = gradients(config, batch, torch.enable_grad), gradients(config, batch, RoundedProducts)
    deviations = {name: float((rounded[name] - grad).norm() / grad.norm()) for name, grad in exact.items()}
    bound = tolerance.fp32_gradients(config).value
    assert max(deviations.values()) <= bound
    without = tolerance.fp32_gradients(Cell(mesh="dp1", seed=seed).config).value
    assert min(deviations.values()) > without
    print(f"{max(deviations.values()):.3g} of {bound:.3g}")
