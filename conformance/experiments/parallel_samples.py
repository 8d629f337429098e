"""Samples of tensor parallelism: modules with each style of `parallelize_module`, and losses under `loss_parallel`.

Numbers are small integers where the module computes them exactly, in any order of sums; others are in fp64.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.distributed.tensor import (
    Placement,
    Replicate,
    Shard,
    parallel,  # for `PrepareModuleInputOutput`, which torch has from 2.8 on
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from conformance.experiments.layouts import Layout, spelled

Letters = dict[str, int]
"""Size of a dimension by its letter, see `operator_samples.sizes`."""
R, ROWS, COLUMNS, LAST = Replicate(), Shard(0), Shard(1), Shard(-1)


@dataclass(frozen=True)
class ParallelSample:
    """Module with a style, and layouts of its inputs and its output."""

    subject: str
    module: Callable[[Letters], nn.Module]
    tensors: Callable[[Letters], list[Tensor]]
    """Full inputs."""
    given: tuple[Layout, ...]
    """Layout of each input."""
    output: Layout | None
    """Layout that the output is to have; None if any will do."""
    style: ParallelStyle | None = None
    is_local: bool = False
    """True if the module is to return a plain tensor."""
    exact: bool = True
    takes_dtensors: bool = True
    takes_plain: bool = True
    """True if the module may be given plain shards, too."""
    tries_empty: bool = True
    """True if sizes are tried that leave some ranks without a shard."""
    inner: Layout = ()
    """Layout in which the module computes with plain shards, whatever it is given."""
    within: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of forward and backward."""

    @property
    def case(self) -> str:
        """Layouts as text."""
        output = "any" if self.output is None else spelled(self.output)
        return f"{' x '.join(map(spelled, self.given))} to {'plain ' if self.is_local else ''}{output}"

    @property
    def bound(self) -> float:
        """Bound on the deviation from the module in one process, relative to the largest expected number.

        0 if numbers must be equal. Norms and losses add at most 2**6 numbers and compose at most 2**4 operators that
        are right to within 4 roundings of fp64 and enlarge none by more than 2**2: 2**14 roundings.
        """
        return 0.0 if self.exact else 2.0 ** (14 - 53)


def style_samples() -> Iterator[ParallelSample]:
    """Yield the samples of all styles."""
    yield from _linear()
    yield from _embedding()
    yield from _sequence()
    yield from _prepared()


def integers(*shape: int, low: int = -2, high: int = 2, seed: int = 0) -> Tensor:
    """Return integers from `low` to `high`, in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).float()


def _with_integers(module: nn.Module) -> nn.Module:
    """Return the module with weights that are small integers."""
    for seed, parameter in enumerate(module.parameters(), 1):
        parameter.data = integers(*parameter.shape, seed=seed).to(parameter.dtype)
    return module


def _linear_of(has_bias: bool, sizes: Letters) -> nn.Module:
    return _with_integers(nn.Linear(sizes["a"], sizes["b"], bias=has_bias))


def _embedding_of(padding: int | None, sizes: Letters) -> nn.Module:
    return _with_integers(nn.Embedding(sizes["b"], sizes["a"], padding_idx=padding))


def _norm_of(make: Callable[[int], nn.Module], _sizes: Letters) -> nn.Module:
    return _with_integers(make(4))


def _linear() -> Iterator[ParallelSample]:
    styles = {
        ColwiseParallel: ((R, ROWS, LAST), (LAST, R, COLUMNS)),
        RowwiseParallel: ((LAST, R, ROWS), (R, ROWS, LAST)),
    }
    for style, (inputs, outputs) in styles.items():
        for index, (at, to) in enumerate(product(inputs, outputs)):
            for has_bias in (True, False)[: 2 if index == 0 else 1]:
                yield ParallelSample(
                    f"{style.__name__} of Linear{'' if has_bias else ' without bias'}",
                    partial(_linear_of, has_bias),
                    lambda sizes: [integers(sizes["a"], sizes["b"], sizes["a"])],
                    ((at,),),
                    (to,),
                    style(input_layouts=at, output_layouts=to, use_local_output=index % 2 == 0),
                    is_local=index % 2 == 0,
                )


def _embedding() -> Iterator[ParallelSample]:
    for style, padding in product((ColwiseParallel, RowwiseParallel), (None, 0)):
        for index, (at, to) in enumerate(product((R, ROWS), (R, COLUMNS, LAST))):
            yield ParallelSample(
                f"{style.__name__} of Embedding{'' if padding is None else ' with padding'}",
                partial(_embedding_of, padding),
                lambda sizes: [integers(sizes["a"], sizes["b"], low=0, high=sizes["b"] - 1).long()],
                ((at,),),
                (to,),
                style(input_layouts=at, output_layouts=to, use_local_output=index % 2 == 1),
                is_local=index % 2 == 1,
            )


_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": lambda width: nn.LayerNorm(width, dtype=torch.float64),
    "LayerNorm without bias": lambda width: nn.LayerNorm(width, bias=False, dtype=torch.float64),
    "RMSNorm": lambda width: nn.RMSNorm(width, dtype=torch.float64),
}
_DROPOUTS: dict[str, Callable[[int], nn.Module]] = {
    "Dropout of nothing": lambda _: nn.Dropout(0.0),
    "Dropout of everything": lambda _: nn.Dropout(1.0),
    "Dropout in evaluation": lambda _: nn.Dropout(0.5).eval(),
}


def _sequence() -> Iterator[ParallelSample]:
    for name, make in (_NORMS | _DROPOUTS).items():
        for index, (dim, is_local) in enumerate(product((1, 0), (False, True))):
            sample = ParallelSample(
                f"SequenceParallel of {name}",
                partial(_norm_of, make),
                lambda sizes: [integers(sizes["a"], sizes["b"], 4).double()],
                ((Shard(dim),),),
                (Shard(dim),),
                SequenceParallel(sequence_dim=dim, use_local_output=is_local),
                is_local=is_local,
                exact=name in _DROPOUTS,
            )
            yield sample
            if index == 0:
                yield replace(sample, given=((R,),), takes_plain=False)


class _Product(nn.Module):
    """Product of two inputs, element by element; the second may be an argument by name."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


def _prepared() -> Iterator[ParallelSample]:
    places: Sequence[Placement] = (R, ROWS, COLUMNS)
    for at, to, is_local in product(places, places, (True, False)):
        both, desired = (at, at), (to, to)
        sample = ParallelSample(
            "PrepareModuleInput",
            lambda _: _Product(),
            lambda sizes: [integers(sizes["a"], sizes["b"], 3, seed=seed) for seed in (1, 2)],
            ((at,), (at,)),
            (to,),
            PrepareModuleInput(input_layouts=both, desired_input_layouts=desired, use_local_output=is_local),
            is_local=is_local,
        )
        yield sample
        yield replace(
            sample,
            subject="PrepareModuleOutput",
            style=PrepareModuleOutput(output_layouts=at, desired_output_layouts=to, use_local_output=is_local),
        )
        yield replace(
            sample,
            subject="PrepareModuleInputOutput",
            output=(at,),
            inner=() if is_local else (to,),
            style=parallel.PrepareModuleInputOutput(
                input_layouts=both,
                desired_input_layouts=desired,
                use_local_input=not is_local,
                output_layouts=to,
                desired_output_layouts=at,
                use_local_output=is_local,
            ),
        )
