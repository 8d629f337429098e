"""Probes of operators: waits, random numbers, kernels that torch chooses by device, and their memory."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed.fsdp  # defines the operators `fsdp::...`
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from conformance.instruments.dispatch_tap import DispatchTap
from conformance.sim_runs.fidelity.probes.device_work import (
    count,
    current_stream,
    growth,
    new_stream,
    occupy,
    on,
    peak_growth,
    settled,
    waits,
)
from conformance.sim_runs.fidelity.rules import Fact

_HEAD_SIZES = (4, 6, 8, 128)
_FUSED_ATTENTION = "aten::_scaled_dot_product_"


def _item(device: torch.device) -> Mapping[str, Fact]:
    x, other = torch.ones((), device=device), new_stream(device)
    torch.accelerator.synchronize(device)
    occupy(other, times=10)
    waited = waits(device, x.item)
    held_up = other.query()
    other.synchronize()
    return {"waits for the current stream": waited, "waits for other streams": held_up}


def _results_of_unknown_size(device: torch.device) -> Mapping[str, Fact]:
    x = torch.tensor([0.0, 1.0, 2.0, 2.0], device=device)
    mask = x > 0
    actions: dict[str, Callable[[], Tensor]] = {
        "nonzero waits": x.nonzero,
        "masked_select waits": lambda: x.masked_select(mask),
        "an index of booleans waits": lambda: x[mask],
        "unique waits": x.unique,
    }
    return {name: waits(device, action) for name, action in actions.items()}


def _results_of_known_size(device: torch.device) -> Mapping[str, Fact]:
    x, index = torch.rand(8, 8, device=device), torch.arange(8, device=device)
    image = torch.rand(1, 1, 8, 8, device=device)
    actions: dict[str, Callable[[], object]] = {
        "add": lambda: x + x,
        "mm": lambda: x @ x,
        "cat": lambda: torch.cat([x, x]),
        "sum": x.sum,
        "sort": x.sort,
        "cumsum": lambda: x.cumsum(0),
        "topk": lambda: x.topk(2),
        "index_select": lambda: x.index_select(0, index),
        "index_put_": lambda: x.index_put_((index,), x.clone()),
        "scatter_add_": lambda: x.scatter_add_(0, index[None], x.clone()),
        "where": lambda: torch.where(x > 0.5, x, 0.0),
        "embedding": lambda: F.embedding(index, x),
        "layer_norm": lambda: F.layer_norm(x, (8,)),
        "cross_entropy": lambda: F.cross_entropy(x, index),
        "conv2d": lambda: F.conv2d(image, image),
        "arange": lambda: torch.arange(8, device=device),
        "rand": lambda: torch.rand(8, device=device),
        "randint": lambda: torch.randint(8, (8,), device=device),
        "normal_": x.clone().normal_,
        "dropout": lambda: F.dropout(x, 0.5),
    }
    return {f"{name} waits": waits(device, action) for name, action in actions.items()}


def _random_operators(device: torch.device) -> Mapping[str, Fact]:
    shares = torch.full((8,), 0.5, device=device)
    return {
        "bernoulli waits": waits(device, shares.bernoulli),
        "normal of means waits": waits(device, lambda: torch.normal(shares, 1.0)),
    }


def _numbers_from_the_host(device: torch.device) -> Mapping[str, Fact]:
    x, factor, stream = torch.ones(4, device=device), torch.tensor(2.0), current_stream(device)
    occupy(stream)
    y = x * factor
    factor.fill_(5.0)
    return {"sees a later change": y[0].item() != 2}


def _mixed_devices(device: torch.device) -> Mapping[str, Fact]:
    try:
        torch.ones(4, device=device) + torch.ones(4)
    except RuntimeError:
        return {"refused": True}
    return {"refused": False}


def _random_numbers(device: torch.device) -> Mapping[str, Fact]:
    side = new_stream(device)
    torch.manual_seed(1)
    in_order = [torch.rand(8, device=device) for _ in range(2)]
    torch.accelerator.synchronize(device)
    torch.manual_seed(1)
    occupy(side)
    with on(side):
        first = torch.rand(8, device=device)
    second = torch.rand(8, device=device)
    second_early = second.tolist()
    side.synchronize()
    return {
        "follow the order of issue": [first.tolist(), second_early] == [numbers.tolist() for numbers in in_order],
    }


def _generator(device: torch.device) -> Mapping[str, Fact]:
    torch.manual_seed(1)
    here = torch.rand(8, device=device).tolist()
    torch.manual_seed(1)
    return {"numbers of the processor": here == torch.rand(8).tolist()}


def _dropout(device: torch.device) -> Mapping[str, Fact]:
    out, mask = torch.native_dropout(torch.ones(64, device=device), 0.75, True)
    return {"mask": str(mask.dtype), "values": str(sorted(set(out.tolist())))}


def _norms(device: torch.device) -> Mapping[str, Fact]:
    x, weight = torch.rand(4, 8, device=device), torch.rand(8, device=device)
    return {"one operator": "aten::_fused_rms_norm" in _operators(lambda: F.rms_norm(x, (8,), weight))}


def _autocast(device: torch.device) -> Mapping[str, Fact]:
    x = torch.rand(8, 8, device=device)
    narrow = x.to(torch.bfloat16)
    with torch.autocast(device.type, torch.bfloat16):
        results = {
            "mm of fp32": x @ x,
            "softmax of bf16": narrow.softmax(0),
            "sum of bf16": narrow.sum(),
            "layer_norm of bf16": F.layer_norm(narrow, (8,)),
            "add of bf16 and fp32": narrow + x,
        }
    return {name: str(result.dtype) for name, result in results.items()}


def _attention(device: torch.device) -> Mapping[str, Fact]:
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return {
            f"{dtype}, heads of {size}": _fused_attention(device, dtype, size)
            for dtype in (torch.float32, torch.bfloat16)
            for size in _HEAD_SIZES
        }
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


def _fused_attention(device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    q, k, v = (torch.rand(2, 2, 16, head_size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    return attention_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))


def _attention_layout(device: torch.device) -> Mapping[str, Fact]:
    strides: dict[str, Fact] = {}
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.rand(2, 3, 16, 8, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        (gradient,) = torch.autograd.grad(out.sum(), q)
        strides |= {f"{dtype}, result": str(out.stride()), f"{dtype}, gradient": str(gradient.stride())}
    return strides


def attention_of(compute: Callable[[], object]) -> str:
    """Return the name of the operator with which a computation attends, such as `flash`; `math` for products alone."""
    names = (name.removeprefix(_FUSED_ATTENTION) for name in _operators(compute) if name.startswith(_FUSED_ATTENTION))
    return ", ".join(sorted({name.partition("_attention")[0] for name in names if "backward" not in name})) or "math"


def _operators(compute: Callable[[], object]) -> set[str]:
    names: set[str] = set()

    def listen(func: Any) -> None:
        names.add(func._schema.name)

    with DispatchTap([listen]):
        compute()
    return names


def _tables(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        packed = torch.rand(2, 3000, device=device)
        shards = [torch.empty(2, 30, device=device) for _ in range(100)]
        buffer = torch.empty(2, 3000, device=device)
        large = [torch.rand(70_000, device=device) for _ in range(100)]
        return {
            "bytes of split_with_sizes_copy": peak_growth(
                device, lambda: torch.split_with_sizes_copy(packed, [30] * 100, dim=1, out=shards)
            ),
            "bytes of chunk_cat": peak_growth(device, lambda: torch.ops.fsdp.chunk_cat(shards, 0, 2, out=buffer)),
            "bytes of _foreach_norm, with 100 results": peak_growth(device, lambda: torch._foreach_norm(large)),
        }


def _workspaces(device: torch.device) -> Mapping[str, Fact]:
    with settled(device):
        x = torch.rand(64, 64, device=device)
        result = x.nbytes
        product = growth(device, "allocated_bytes", lambda: x @ x) - result
        numbers = torch.rand(1 << 20, device=device)
        sorting = peak_growth(device, numbers.sort) - 3 * numbers.nbytes  # numbers and their int64 places
        return {"bytes that a first product keeps": product, "bytes that sort takes for a time": sorting}


class _Tripled(torch.autograd.Function):
    """Identity with a wrong gradient, which notes the stream on which its backward is issued."""

    streams: ClassVar[list[torch.Stream]] = []

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        _Tripled.streams.append(current_stream(grad.device))
        return grad * 3


def _backward(device: torch.device) -> Mapping[str, Fact]:
    x, side = torch.ones(8, device=device, requires_grad=True), new_stream(device)
    side.wait_stream(current_stream(device))
    with on(side):
        y = _Tripled.apply(x)  # type: ignore[no-untyped-call]
        occupy(side)
        total = y.sum()
    current_stream(device).wait_stream(side)
    _Tripled.streams.clear()
    total.backward()
    assert x.grad is not None
    return {
        "on the stream of forward": _Tripled.streams == [side],
        "the caller's stream sees the gradients": x.grad[0].item() == 3,
    }


def _resized_storage(device: torch.device) -> Mapping[str, Fact]:
    x = torch.arange(4.0, device=device)
    before = count(device, "allocated_bytes")
    x.untyped_storage().resize_(4096)
    grown = count(device, "allocated_bytes") - before
    kept = x.tolist() == [0, 1, 2, 3]
    x.untyped_storage().resize_(0)
    freed = before - count(device, "allocated_bytes")
    return {"keeps what fits": kept, "bytes more for 4096": grown, "bytes that a size of 0 frees": freed}


PROBES = {
    "item": _item,
    "results-of-unknown-size": _results_of_unknown_size,
    "results-of-known-size": _results_of_known_size,
    "random-operators": _random_operators,
    "numbers-from-the-host": _numbers_from_the_host,
    "mixed-devices": _mixed_devices,
    "random-numbers": _random_numbers,
    "generator": _generator,
    "dropout": _dropout,
    "norms": _norms,
    "autocast": _autocast,
    "attention": _attention,
    "attention-layout": _attention_layout,
    "tables": _tables,
    "workspaces": _workspaces,
    "backward": _backward,
    "resized-storage": _resized_storage,
}
