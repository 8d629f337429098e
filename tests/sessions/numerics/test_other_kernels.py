"""Kernels that add in another order, in a separate process, since they cannot be removed."""

import json
from functools import cache
from typing import Any

import pytest

from tests.support import forked

PROGRAM = """
import json, sys
import torch
import torch.nn.functional as F
from conformance.numerics import other_kernels

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)

def random(*shape, dtype):
    return torch.randn(*shape, generator=generator).to(dtype)

def cases(dtype):
    a, b, c = random(6, 9, dtype=dtype), random(9, 5, dtype=dtype), random(5, dtype=dtype)
    q, k, v, g = (random(2, 3, 8, 4, dtype=dtype).requires_grad_() for _ in range(4))
    heads = [random(2, 8, 3, 4, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    x, w = random(12, 37, dtype=dtype), random(5, 3, dtype=dtype).requires_grad_()
    ids, labels = torch.randint(0, 5, (4, 6), generator=generator), torch.randint(0, 37, (12,), generator=generator)
    labels[3] = -100
    wide = torch.zeros(12, 40, dtype=dtype)
    wide[:, 1:38] = x
    attend = F.scaled_dot_product_attention
    return {
        "mm": lambda: a @ b,
        "addmm": lambda: torch.addmm(c, a, b),
        "addmm, scaled": lambda: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
        "bmm": lambda: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT),
        "sum": lambda: x.sum(0),
        "sum of all": lambda: x.sum(),
        "sum of dimensions": lambda: x.sum((0, 1), keepdim=True),
        "sum of a number": lambda: x[0, 0].sum(),
        "mean": lambda: x.mean(-1, keepdim=True),
        "2-norm": lambda: torch.linalg.vector_norm(x),
        "3-norm": lambda: torch.linalg.vector_norm(x, 3, dim=0),
        "inf-norm": lambda: torch.linalg.vector_norm(x, float("inf")),
        "softmax": lambda: x.softmax(-1),
        "log-softmax": lambda: F.log_softmax(x, 0),
        "summed loss": lambda: F.cross_entropy(x, labels, reduction="sum"),
        "mean loss": lambda: F.cross_entropy(x, labels),
        "losses": lambda: F.cross_entropy(x, labels, reduction="none"),
        "embedding": lambda: torch.autograd.grad(F.embedding(ids, w), w, random(4, 6, 3, dtype=dtype) * 0 + 1.1)[0],
        "embedding, padded": lambda: torch.autograd.grad(F.embedding(ids, w, padding_idx=2).sum(), w)[0],
        "attention": lambda: attend(q, k, v, is_causal=True),
        "attention, masked": lambda: attend(q, k, v, attn_mask=torch.eye(8, dtype=dtype)),
        "attention, gradients": lambda: torch.autograd.grad(attend(q, k, v, is_causal=True), (q, k, v), g),
        "attention of heads": lambda: attend(*heads, is_causal=True),
        "attention of heads, gradients": lambda: torch.autograd.grad(attend(*heads, is_causal=True), heads, g),
        "sum of integers": lambda: ids.sum(),
        "count": lambda: (ids > 2).sum(0),
        "whole numbers": lambda: (a * 8).round() @ (b * 8).round(),
        "rows": lambda: x.sum(1),
        "rows of a wider tensor": lambda: wide[:, 1:38].sum(1),
        "nothing": lambda: x[:0].sum(),
    }

def flat(results):
    return [r.detach() for r in (results if isinstance(results, tuple) else (results,))]

tried = {str(dtype)[6:]: cases(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)}
before = {(dtype, name): flat(call()) for dtype, named in tried.items() for name, call in named.items()}
other_kernels.install(int(sys.argv[1]))
other_kernels.install(int(sys.argv[1]))
found = []
for (dtype, name), expected in before.items():
    results, again = flat(tried[dtype][name]()), flat(tried[dtype][name]())
    for old, new, repeated in zip(expected, results, again, strict=True):
        deviation = (old.double() - new.double()).norm() / max(float(old.double().norm()), 1e-30)
        layout = (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype)
        found.append([dtype, name, float(deviation), layout, torch.equal(new, repeated), new.double().sum().item()])
try:
    other_kernels.install(99)
    second = ""
except ValueError as error:
    second = str(error)
print(json.dumps({"found": found, "second": second}))
"""


@cache
def with_seed(seed: int) -> Any:
    done = forked.run_text(PROGRAM, str(seed))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def deviations(seed: int, dtype: str) -> dict[str, float]:
    return {name: deviation for of, name, deviation, *_ in with_seed(seed)["found"] if of == dtype}


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("bfloat16", 1e-2), ("float64", 1e-14)])
def test_results_are_those_of_torch_but_for_rounding(dtype: str, limit: float) -> None:
    assert max(deviations(1, dtype).values()) < limit


def test_many_results_are_rounded_otherwise() -> None:
    changed = {name for seed in (1, 2, 3) for name, deviation in deviations(seed, "float32").items() if deviation}
    assert len(changed) > 15
    assert changed >= {"mm", "addmm", "bmm", "sum", "mean", "2-norm", "log-softmax", "attention"}


def test_whole_numbers_and_maxima_are_exact() -> None:
    for name in ("whole numbers", "sum of integers", "count", "inf-norm"):
        assert [deviations(seed, "float32")[name] for seed in (1, 2, 3)] == [0.0] * 3, name


def test_shapes_strides_and_dtypes_are_those_of_torch_and_repeated_calls_are_equal() -> None:
    wrong = [
        (dtype, name) for dtype, name, _, layout, repeated, _ in with_seed(1)["found"] if not (layout and repeated)
    ]
    assert wrong == []


def test_seeds_and_layouts_choose_other_orders() -> None:
    sums = {
        (seed, name): total
        for seed in (1, 2, 3)
        for dtype, name, *_, total in with_seed(seed)["found"]
        if dtype == "float32"
    }
    assert len({sums[seed, "attention"] for seed in (1, 2, 3)}) > 1
    assert any(sums[seed, "rows"] != sums[seed, "rows of a wider tensor"] for seed in (1, 2, 3))


def test_kernels_of_another_seed_are_refused() -> None:
    assert with_seed(1)["second"] == "this process has other kernels already: seed 99 cannot replace them"
