"""Temporaries of clipping and of the optimizer's step, of which the memory model needs the sizes."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from conformance.oracles.torch_versions import VersionTraits
from reference_trainer.config import OptimizerConfig
from reference_trainer.parallel_dims import ParallelDims


def optimizer_temporaries(options: OptimizerConfig, matrices: Sequence[int], vectors: Sequence[int]) -> Iterator[int]:
    """Yield the elements that a step holds for a while: AdamW's denominators, or SGD's sums of gradients and decay.

    `matrices` and `vectors` are the elements of shards, in the order of the optimizer; a fused kernel needs no more. In
    a loop AdamW computes a root and its quotient while it still holds the last denominator. `foreach` computes all
    roots of a group, and goes on in place.

    Sources: `_single_tensor_adam`, `_multi_tensor_adam` in torch/optim/adam.py; torch/optim/sgd.py.
    """
    if options.implementation == "fused":
        return
    decaying = matrices if options.weight_decay else []
    for shards in [matrices, vectors] if options.name == "adamw" else [decaying]:
        if options.implementation == "foreach":
            yield sum(shards)
        elif options.name == "adamw":
            yield from (before + 2 * shard for before, shard in pairwise([0, *shards]))
        else:
            yield max(shards, default=0)


def scalars_of_norms(
    order: float, parameters: int, replicated_over_tp: int, dims: ParallelDims, traits: VersionTraits
) -> int:
    """Return the number of scalars: norms, the norms in a stack, and reductions of the stack over the mesh.

    The inf-norm is that of local shards, of which the trainer reduces one number (`reference_trainer/clip.py`).
    Up to torch 2.9 the stack is left pending. The norm of a parameter that is replicated over tensor-parallel ranks is
    then put into the stack as a partial sum.
    """
    if order == math.inf:
        return 2 * parameters
    if not traits.norms_reduced_one_by_one:
        return 2 * parameters + replicated_over_tp * (dims.tp > 1)
    reductions = (dims.dp_shard > 1) + (dims.tp > 1)
    return parameters * (2 + (2 + reductions if reductions else 0))
