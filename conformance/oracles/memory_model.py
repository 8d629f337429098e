"""Memory model: what a rank holds in each phase of a training step, beside what it held before the step.

A walk through the step as FSDP2 takes it (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and
_fsdp_collectives.py): each buffer is held from a moment to another, and what the model itself needs, activations and
their gradients, comes from a run without FSDP (`rank_memory.without_fsdp`), which is marked at the same moments. Of a
group, of n elements with padding and s = n / ranks in each shard:

    A  n of the compute dtype   output of the all-gather, of which the input is a part; in forward until the next group
                                has copied its own out (up to torch 2.13; from 2.15 on until it begins to), in backward
                                until it is copied out itself
    C  s of the compute dtype   a shard in the dtype of computation, while it is gathered
    U  n of the compute dtype   unsharded parameters, until they are resharded
    P  n / k                    what is left of them if they are resharded to k ranks
    I  n of the reduce dtype    input of the reduce-scatter, until the next group's backward is over
    O  s of the reduce dtype    its output; with HSDP until the end of backward, unless it becomes the gradient
    G  s of the masters' dtype  reduced gradients, until zero_grad
    L  parameters, unpadded     gradients that wait for the last micro-batch, in the dtype in which they are added up

On the CPU, gradients of parameters that need padding are copied once more while I is filled (`_chunk_cat`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
import torch

from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.schedule import communicates, group_of, ranks_after_forward
from reference_trainer.config import TrainerConfig
from reference_trainer.mesh import ParallelDims


class Segment(msgspec.Struct, frozen=True):
    """What a run without FSDP holds between two marks, see `instruments.activations`."""

    mark: str
    start_bytes: int
    peak_bytes: int
    end_bytes: int


class Lifetimes(msgspec.Struct, frozen=True):
    """What differs between versions of torch."""

    previous_gather_until_copied: bool = True
    """In forward the output of the previous all-gather is kept until the next one is copied out (up to 2.13)."""
    last_gradient_until_reduced: bool = True
    """The gradient of a group's last parameter is held until the group is reduced, in a variable of a loop over all of
    them (`foreach_reduce`, up to 2.13)."""


UP_TO_2_13 = Lifetimes()
FROM_2_15 = Lifetimes(previous_gather_until_copied=False, last_gradient_until_reduced=False)


def lifetimes_of(torch_version: str) -> Lifetimes:
    """Of torch 2.14 nothing is known: it is taken to be like 2.15."""
    major, minor = (int(part) for part in torch_version.split("+")[0].split(".")[:2])
    return UP_TO_2_13 if (major, minor) <= (2, 13) else FROM_2_15


class Usage(msgspec.Struct):
    """Of one phase."""

    peak_bytes: int = 0
    end_bytes: int = 0


def usage_by_phase(segments: Iterable[Segment]) -> dict[str, Usage]:
    """What was measured between marks that are phases: over all micro-batches the largest peak, and the last rest."""
    phases: dict[str, Usage] = {}
    for segment in segments:
        usage = phases.setdefault(segment.mark, Usage())
        usage.peak_bytes = max(usage.peak_bytes, segment.peak_bytes)
        usage.end_bytes = segment.end_bytes
    return phases


def predict(
    config: TrainerConfig,
    dims: ParallelDims,
    shapes: Mapping[str, Sequence[int]],
    profile: Sequence[Segment],
    *,
    lifetimes: Lifetimes = UP_TO_2_13,
) -> dict[str, Usage]:
    """Peak and rest of `forward`, `backward`, `clip`, `optimizer` and `idle`, over all micro-batches of a step.

    `shapes` are what FSDP divides, by parameter.
    """
    walk = _Walk(config, dims, shapes, lifetimes)
    for micro_batch in range(config.accumulation):
        walk.micro_batch(profile, micro_batch)
    walk.after_backward()
    return walk.phases


def state_bytes(config: TrainerConfig, dims: ParallelDims, shapes: Mapping[str, Sequence[int]]) -> int:
    """What is there in all phases: shards with padding, and as much for each moment that the optimizer keeps."""
    moments = {"adamw": 2, "sgd": 0}[config.optimizer.name]
    master = int(getattr(torch, dtype_policy(config.precision).sharded).itemsize)
    shards = sum(-(-rows // dims.dp_shard) * math.prod(rest) for rows, *rest in shapes.values())
    return shards * master * (1 + moments)


def group_bytes(config: TrainerConfig, dims: ParallelDims, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Unsharded parameters of each group, with padding, in the dtype of computation."""
    compute = int(getattr(torch, dtype_policy(config.precision).compute).itemsize)
    whole: dict[str, int] = {}
    for name, (rows, *rest) in shapes.items():
        group, numel = group_of(name, config), -(-rows // dims.dp_shard) * dims.dp_shard * math.prod(rest)
        whole[group] = whole.get(group, 0) + numel * compute
    return whole


class _Walk:
    def __init__(
        self,
        config: TrainerConfig,
        dims: ParallelDims,
        shapes: Mapping[str, Sequence[int]],
        lifetimes: Lifetimes,
    ) -> None:
        self.phases: dict[str, Usage] = {}
        self._config, self._dims, self._lifetimes = config, dims, lifetimes
        policy = dtype_policy(config.precision)
        self._compute, self._reduce, self._master = (
            getattr(torch, name).itemsize for name in (policy.compute, policy.reduce, policy.sharded)
        )
        self._shard: dict[str, int] = {}
        self._shards: dict[str, list[int]] = {}
        """Of each parameter of a group."""
        self._numel: dict[str, list[int]] = {}
        """Of each parameter of a group, without padding."""
        self._uneven: dict[str, int] = {}
        """Elements, with padding, of the parameters of a group that need it."""
        self._parameters = len(shapes)
        self._optimizer_groups: tuple[list[int], list[int]] = ([], [])
        """Shards of matrices and of vectors, in the order of the optimizer."""
        for name, (rows, *rest) in shapes.items():
            group, row = group_of(name, config), math.prod(rest)
            shard = -(-rows // dims.dp_shard) * row
            self._shard[group] = self._shard.get(group, 0) + shard
            self._shards.setdefault(group, []).append(shard)
            self._numel.setdefault(group, []).append(rows * row)
            if rows % dims.dp_shard:
                self._uneven[group] = self._uneven.get(group, 0) + shard * dims.dp_shard
            self._optimizer_groups[0 if rest else 1].append(shard)
        self._held: dict[str, int] = {}
        self._phase = "forward"
        self._model_bytes = self._gradients = 0
        self._left: list[str] = []
        self._reduces = self._all_reduces = True

    # Accounts

    def _hold(self, name: str, nbytes: int) -> None:
        self._held[name] = self._held.get(name, 0) + nbytes
        self._note()

    def _free(self, name: str) -> None:
        self._held.pop(name, None)
        self._note()

    def _note(self, extra: int = 0) -> None:
        usage = self.phases.setdefault(self._phase, Usage())
        usage.end_bytes = sum(self._held.values()) + self._model_bytes
        usage.peak_bytes = max(usage.peak_bytes, usage.end_bytes + extra)

    # Phases

    def micro_batch(self, profile: Sequence[Segment], index: int) -> None:
        self._left.clear()
        self._reduces, self._all_reduces = communicates(self._config, index)
        for segment in profile:
            self._model_bytes = segment.start_bytes
            what, _, group = segment.mark.partition(" ")
            if what == "after-backward":
                self._gradients = segment.start_bytes - segment.end_bytes
            if what == "backward" and not group:
                self._phase = "backward"
            elif what == "forward" and not group:
                self._phase = "forward"
            elif group:
                {
                    "forward": self._forward,
                    "after-forward": self._after_forward,
                    "backward": self._backward,
                    "after-backward": self._after_backward,
                    "freed": self._reduce_gradients,
                }[what](group)
            elif what == "end":
                self._end_of_backward()
            self._note(segment.peak_bytes - segment.start_bytes)
            self._model_bytes = segment.end_bytes
            self._note()
        self._model_bytes = 0
        self._note()

    def after_backward(self) -> None:
        """Clipping works in place."""
        self._phase = "clip"
        self._note(self._scalars_of_a_norm() * self._parameters)
        self._phase = "optimizer"
        if self._config.optimizer.name == "adamw":
            for shards in self._optimizer_groups:
                self._adamw(shards)
        self._free_all([name for name in self._held if name.startswith("G ")])
        self._phase = "idle"
        self._note()

    def _adamw(self, shards: Sequence[int]) -> None:
        """One parameter after the other: a root and its quotient are computed while the last denominator is still held
        (`_single_tensor_adam` in torch/optim/adam.py)."""
        for before, shard in pairwise([0, *shards]):
            self._note((before + 2 * shard) * self._master)

    def _scalars_of_a_norm(self) -> int:
        """Bytes for each parameter: its norm, that in a stack, and what becomes of the stack over the mesh."""
        reductions = (self._dims.dp_shard > 1) + (self._dims.tp > 1)
        return 4 * (2 + (2 + reductions if reductions else 0))

    # Moments of a group

    def _forward(self, group: str) -> None:
        self._unshard(group)
        previous = [name for name in self._held if name.startswith("A ") and name != f"A {group}"]
        if not self._lifetimes.previous_gather_until_copied:
            self._free_all(previous)
        self._copy_out(group)
        self._free_all(previous)

    def _after_forward(self, group: str) -> None:
        self._left.append(group)
        ranks = ranks_after_forward(group, self._config)
        if ranks > 1:
            self._keep_part(group, ranks)
        if ranks != 1:
            self._free(f"U {group}")
        if group == "output":  # the last group: the root's forward is over
            self._free(f"A {group}")

    def _keep_part(self, group: str, ranks: int) -> None:
        """Parameter by parameter: a part is copied, and the whole freed."""
        for shard in self._shards[group]:
            whole = shard * self._dims.dp_shard * self._compute
            self._hold(f"P {group}", whole // ranks)
            self._held[f"U {group}"] -= whole

    def _backward(self, group: str) -> None:
        self._unshard(group)
        self._copy_out(group)
        self._free(f"A {group}")
        ahead = self._left.index(group) - 1
        if ahead >= 0:
            self._unshard(self._left[ahead])

    def _after_backward(self, group: str) -> None:
        if self._reduces and f"L {group}" not in self._held:
            self._take_own_part(group)
        self._free(f"U {group}")
        if not self._reduces:
            return
        self._free_all([name for name in self._held if name.startswith("I ")])
        self._hold(f"I {group}", self._whole(group) * self._reduce)
        self._note(self._uneven.get(group, 0) * self._compute)

    def _take_own_part(self, group: str) -> None:
        """Of the embedding's gradient with tensor parallelism: each rank has computed the whole."""
        own = sum(self._numel[group]) * self._compute
        if self._gradients > own:
            self._note(own)
            self._model_bytes -= self._gradients - own

    def _reduce_gradients(self, group: str) -> None:
        if not self._reduces:
            self._held[f"L {group}"] = self._gradients * self._reduce // self._compute
            self._note()
            return
        if self._dims.dp_shard > 1 and self._lifetimes.last_gradient_until_reduced:
            itemsize = self._reduce if f"L {group}" in self._held else self._compute
            self._hold("last gradient", self._numel[group][-1] * itemsize)
        self._free(f"L {group}")
        self._reduce_to_shards(group)
        self._free("last gradient")

    def _reduce_to_shards(self, group: str) -> None:
        output = self._shard[group] * self._reduce
        self._hold("O", output)
        if not self._all_reduces:
            self._held[f"partial {group}"] = output
            self._free("O")
            return
        self._free(f"partial {group}")
        if self._reduce == self._master:
            if f"G {group}" in self._held and self._dims.dp_replicate > 1:
                self._held[f"O {group}"] = output
            self._free("O")
            self._held[f"G {group}"] = output
            self._note()
            return
        added = self._shard[group] * self._master
        self._note(added)
        if self._dims.dp_replicate > 1:
            self._held[f"O {group}"] = self._held["O"]
        self._free("O")
        self._held[f"G {group}"] = added
        self._note()

    def _end_of_backward(self) -> None:
        self._free_all([name for name in self._held if name.startswith(("I ", "O "))])

    # Parts

    def _unshard(self, group: str) -> None:
        if f"U {group}" in self._held or f"A {group}" in self._held:
            return
        ranks = ranks_after_forward(group, self._config) if f"P {group}" in self._held else self._dims.dp_shard
        if ranks == 1:
            return
        cast = self._whole(group) // ranks * self._compute if self._compute != self._master else 0
        self._hold("C", cast)
        self._hold(f"A {group}", self._whole(group) * self._compute)
        self._free("C")

    def _copy_out(self, group: str) -> None:
        if f"U {group}" in self._held:
            return
        self._hold(f"U {group}", self._whole(group) * self._compute)
        if self._dims.dp_shard == 1 and self._compute != self._master:
            self._note(self._whole(group) * self._compute)
        self._free(f"P {group}")

    def _free_all(self, names: Sequence[str]) -> None:
        for name in names:
            self._free(name)

    def _whole(self, group: str) -> int:
        return self._shard[group] * self._dims.dp_shard
