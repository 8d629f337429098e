"""Ways to call an operator: as function or method, in place, with `out=`, as a view, under autocast."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from conformance.sim_runs.operators.samples import Sample, tensors

Variant = Callable[[Any, Sample], Any]
"""Function of an operator info and a sample; returns nested tensors. Raises NotApplicable without such a variant."""


class NotApplicable(Exception):
    """The operator has no such variant, or not for this sample."""


def function(info: Any, sample: Sample) -> Any:
    """Return outputs and gradients of the function."""
    return _with_gradients(info.op(*sample.args, **sample.kwargs), sample, sample.leaves())


def method(info: Any, sample: Sample) -> Any:
    """Return outputs of the method of the same name."""
    if info.method_variant is None or not isinstance(sample.args[0], Tensor):
        raise NotApplicable
    return info.method_variant(*sample.args, **sample.kwargs)


def in_place(info: Any, sample: Sample) -> Any:
    """Return the input that the operator has overwritten, and its gradients: contiguous, transposed, and a slice."""
    first = sample.args[0]
    if info.inplace_variant is None:
        raise NotApplicable
    if not isinstance(first, Tensor):
        return [info.inplace_variant(*_detached(sample.args), **sample.kwargs), list(tensors(_detached(sample.args)))]
    results = []
    for base in _layouts(first.detach()):
        leaf = base.requires_grad_(first.requires_grad and info.supports_inplace_autograd)
        target = leaf * 1 if leaf.requires_grad else leaf
        view = target[1:-1] if target.dim() and target.shape[0] == first.shape[0] + 2 else target
        output = info.inplace_variant(view, *_detached(sample.args[1:]), **_detached(sample.kwargs))
        results.append(_with_gradients((output, target), sample, [leaf] if leaf.requires_grad else []))
    return results


def _layouts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield copies of a tensor: contiguous, with reversed dimensions, and with a row before and behind."""
    yield tensor.clone()
    if tensor.dim() > 1:
        order = tuple(reversed(range(tensor.dim())))
        yield tensor.permute(order).contiguous().permute(order)
    if tensor.dim():
        row = tensor.new_ones(1, *tensor.shape[1:])
        yield torch.cat([row, tensor, row])


def out(info: Any, sample: Sample) -> Any:
    """Return tensors given as `out`: of the right size, transposed, and empty ones that the operator resizes."""
    if not info.supports_out:
        raise NotApplicable
    with torch.no_grad():
        args, kwargs = _detached(sample.args), _detached(sample.kwargs)
        expected = info.op(*args, **kwargs)
        results = []
        for make in (torch.empty_like, _transposed_like, lambda tensor: tensor.new_empty(0)):
            given = _mapped(expected, make)
            results.append((info.op(*args, **kwargs, out=given), given))
    return results


def _transposed_like(tensor: Tensor) -> Tensor:
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order).clone()


def view(info: Any, sample: Sample) -> Any:
    """Return base and gradients after a write into the outputs, which must be views of the input."""
    first = sample.args[0]
    if not isinstance(first, Tensor) or first.layout != torch.strided:
        raise NotApplicable
    base = first * 1 if first.requires_grad else first
    results = list(tensors(info.op(base, *sample.args[1:], **sample.kwargs)))
    shared = [result for result in results if _storage(result) == _storage(base)]
    if not shared or not base.numel():
        raise NotApplicable
    (shared[0].logical_not_() if first.dtype == torch.bool else shared[0].mul_(3))
    return _with_gradients((shared, base), sample, [first] if first.requires_grad else [])


def autocast(info: Any, sample: Sample) -> Any:
    """Return outputs and gradients under autocast to bfloat16."""
    with torch.autocast(_device_type(sample), dtype=torch.bfloat16):
        outputs = info.op(*sample.args, **sample.kwargs)
    return _with_gradients(outputs, sample, sample.leaves())


def _device_type(sample: Sample) -> str:
    return next((tensor.device.type for tensor in tensors((sample.args, sample.kwargs))), "cpu")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _detached(value: Any) -> Any:
    return _mapped(value, Tensor.detach)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, change) for each in value])
    return {key: _mapped(each, change) for key, each in value.items()} if isinstance(value, dict) else value


def _with_gradients(outputs: Any, sample: Sample, leaves: list[Tensor]) -> Any:
    """Return outputs, and gradients of leaves for cotangents that depend on the shapes alone."""
    finished = [tensor for tensor in tensors(sample.finish(outputs)) if tensor.requires_grad and tensor.grad_fn]
    if not leaves or not finished:
        return outputs
    cotangents = [_cotangent(tensor) for tensor in finished]
    gradients = torch.autograd.grad(finished, leaves, cotangents, allow_unused=True)
    return outputs, [gradient for gradient in gradients if gradient is not None]


def _cotangent(tensor: Tensor) -> Tensor:
    values = (torch.arange(tensor.numel()) % 7 - 3).div(4).to(tensor.dtype).reshape(tensor.shape)
    return values.to(tensor.device)


VARIANTS: dict[str, Variant] = {
    "function": function,
    "method": method,
    "in place": in_place,
    "out": out,
    "view": view,
    "autocast": autocast,
}
"""Variants by name."""
