"""Facts of a device's kernels on which bounds of 0 rest, before any communication.

    python -m benchmarks.device_trial.kernels cuda|cpu

Of products with the shapes of the matrix's models: whether bits are equal when they are repeated, with operands that
are cut from a wider tensor, in half batches, and with torch's default knobs; which attention torch chooses by dtype and
head size, deterministic and by default; the backward of an embedding; RMSNorm of half a sequence; optimizers against
the processor's.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor

from benchmarks.device_trial.stages import tell, yes
from conformance.numerics.knobs import pin_knobs
from conformance.sim_runs.fidelity.probes.operators import attention_of

SHAPES = (
    (128, 32, 64),
    (256, 32, 61),
    (256, 32, 31),
    (256, 32, 30),
    (64, 32, 32),
    (256, 64, 256),
    (256, 30, 45),
    (256, 36, 50),
)
"""Tokens of a rank, inputs and outputs of linear layers of the matrix's models."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (4, 6, 8, 128)
_GENERATOR = torch.Generator().manual_seed(0)


def main(device: str) -> int:
    """Print the facts; exit status 1 if equal products differ, and then no bound of 0 means anything."""
    pin_knobs(device)
    are_repeatable = [_products(dtype, device) for dtype in DTYPES]
    for dtype in DTYPES:
        _attention(dtype, device)
        _embedding(dtype, device)
        _norms(dtype, device)
    _optimizers(device)
    return 0 if all(are_repeatable) else 1


def _random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, generator=_GENERATOR).to(device, dtype)


def _are_equal(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(results, others, strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _products(dtype: torch.dtype, device: str) -> bool:
    repeated, cut_input, cut_weight, halves, defaults = [], [], [], [], []
    for tokens, inputs, outputs in SHAPES:
        x, w = _random(tokens, inputs, dtype=dtype, device=device), _random(outputs, inputs, dtype=dtype, device=device)
        gradient = _random(tokens, outputs, dtype=dtype, device=device)
        products = _layer_products(x, w, gradient)
        repeated.append(_are_equal(products, _layer_products(x, w, gradient)))
        wide = torch.zeros(tokens, 2 * outputs + 1, device=device, dtype=dtype)
        wide[:, outputs + 1 :] = gradient
        _, input_grad, weight_grad = _layer_products(x, w, wide[:, outputs + 1 :])
        cut_input.append(torch.equal(input_grad, products[1]))
        cut_weight.append(torch.equal(weight_grad, products[2]))
        halves.append(torch.equal(products[0], torch.cat([half @ w.T for half in x.chunk(2)])))
        defaults.append(_are_equal(products, _with_default_knobs(partial(_layer_products, x, w, gradient), device)))
    tell(
        f"products {_name(dtype)}",
        f"repeated {yes(repeated)}; cut from a wider tensor: input's gradient {yes(cut_input)}, weight's "
        f"{yes(cut_weight)}; half batch {yes(halves)}; default knobs {yes(defaults)}",
    )
    return all(repeated)


def _layer_products(x: Tensor, w: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return the output of a linear layer, and the gradients of its input and of its weight."""
    return [x @ w.T, gradient @ w, gradient.T @ x]


def _with_default_knobs(compute: Callable[[], Any], device: str) -> Any:
    """Compute as a process that no rank is: with torch's defaults for reductions in 16 bits and for determinism."""
    matmul = torch.backends.cuda.matmul
    torch.use_deterministic_algorithms(False)
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    try:
        return compute()
    finally:
        pin_knobs(device)


def _attention(dtype: torch.dtype, device: str) -> None:
    """Tell which kernels torch chooses, by head size, and whether equal calls are equal."""
    chosen = []
    for head_dim in HEAD_DIMS:
        q, k, v = (_random(8, 8, 16, head_dim, dtype=dtype, device=device).requires_grad_() for _ in range(3))

        def gradients(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> list[Tensor]:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

        deterministic = attention_of(gradients)
        by_default = _with_default_knobs(partial(attention_of, gradients), device)
        repeated = _are_equal(gradients(), gradients())
        other = "" if by_default == deterministic else f" ({by_default} by default)"
        chosen.append(f"{head_dim}: {deterministic}{other}{'' if repeated else ', NOT REPEATABLE'}")
    tell(f"attention {_name(dtype)} by head size", "; ".join(chosen))


def _embedding(dtype: torch.dtype, device: str) -> None:
    ids = torch.randint(0, 61, (16, 16), generator=_GENERATOR).to(device)
    weight = _random(61, 32, dtype=dtype, device=device).requires_grad_()
    gradient = _random(16, 16, 32, dtype=dtype, device=device)

    def backward() -> list[Tensor]:
        return [torch.autograd.grad(F.embedding(ids, weight), weight, gradient)[0]]

    first = backward()
    repeated = [_are_equal(first, backward()) for _ in range(3)]
    tell(f"embedding backward {_name(dtype)}", f"repeated {yes(repeated)}")


def _norms(dtype: torch.dtype, device: str) -> None:
    x, weight = _random(16, 16, 32, dtype=dtype, device=device), _random(32, dtype=dtype, device=device)
    halves = torch.cat([F.rms_norm(half.contiguous(), (32,), weight) for half in x.chunk(2, 1)], 1)
    tell(f"rms_norm {_name(dtype)}", f"sequence in halves {yes([torch.equal(F.rms_norm(x, (32,), weight), halves)])}")


def _optimizers(device: str) -> None:
    initial = [torch.randn(numel, generator=_GENERATOR) for numel in (7, 64, 1000)]
    for name in ("foreach", "loop", "fused"):
        here, on_host = (_stepped(initial, name, place) for place in (device, "cpu"))
        tell(f"AdamW {name}", f"equal to the processor's {yes([_are_equal(here, on_host)])}")


def _stepped(initial: Sequence[Tensor], name: str, device: str) -> list[Tensor]:
    parameters = [p.to(device, copy=True).requires_grad_() for p in initial]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, foreach=name == "foreach", fused=name == "fused")
    for _ in range(3):
        for p in parameters:
            p.grad = p.detach() * 0.37 + 0.01
        optimizer.step()
    return [p.detach().cpu() for p in parameters]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
