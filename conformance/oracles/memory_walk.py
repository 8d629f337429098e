"""Walk through a training step: the buffers that a rank holds, above the bytes that it held before the step.

The step is that of FSDP2 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py): each
buffer is held from one point in time to another. The memory of the model itself, activations and gradients of all
unsharded parameters, comes from a run without FSDP (`experiments.without_fsdp`), which is marked at the same points.
Buffers of a group, of n elements with padding and s = n / ranks in each shard (experts on a mesh of their own, of which
a rank holds some, have fewer ranks than the rest of their block, see `schedule.Sharding`):

    A  n of the compute dtype   output of the all-gather, of which the input is a slice; in forward until the next group
                                has copied its own out (up to torch 2.14; from 2.15 on until it begins to), in backward
                                until it is copied out itself; there are several if groups are prefetched
    C  s of the compute dtype   a shard in the dtype of computation, while it is gathered
                                (of weights that are gathered in float8, A, C and U have a byte for each element)
    U  n of the compute dtype   unsharded parameters, until they are resharded
    P  n / k                    the shard that is left of U if it is resharded to k ranks
    I  n of the reduce dtype    input of the reduce-scatter, until the next group's backward is over
    O  s of the reduce dtype    its output; with HSDP until the end of backward, unless it becomes the gradient
    G  s of the masters' dtype  reduced gradients, until zero_grad
    B  parameters, unpadded     gradients as autograd leaves them, from the group's backward until I is filled
    cut                         the last gradient that was cut into columns, of parameters that are sharded by columns
    L  parameters, unpadded     gradients that wait for the last micro-batch, in the reduce dtype, unless they are B's

A group of one shard whose gradients are divided by a number of the trainer's needs O once more for the quotient. Where
checkpointing recomputes a block in backward, the groups inside of it are gathered for that, and stay for their own
backward; A is freed when the recomputed forward of the group is over. Rows that ranks exchange for experts are among
the activations: a run without FSDP exchanges them as well.

On the CPU I is filled with further copies (`_copies_to_fill`), and one parameter's gradient is cast to be added to L.

Where the ranks do not divide a parameter's rows, s is that of the first rank for all of them: each allocates its shard
with padding, and G is a view of O. The optimizer sees views without padding: its state and temporaries are smaller on
the last ranks (`_init_sharded_param` of torch/distributed/fsdp/_fully_shard/_fsdp_param.py, `sharded_size`).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec
import torch

from conformance.memory_segment import MemorySegment
from conformance.oracles import pipeline
from conformance.oracles.clip_schedule import ByMesh
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.frozen import trained
from conformance.oracles.schedule import (
    ForwardOrder,
    Shapes,
    Sharding,
    communicates,
    groups,
    leaves_in_backward,
    left,
    passes_of,
    prefetched_in_backward,
    prefetched_in_forward,
    ranks_after_forward,
    shardings,
)
from conformance.oracles.torch_versions import VersionTraits
from conformance.oracles.tp_schedule import sharded_dim
from reference_trainer.config import OptimizerConfig, TrainerConfig
from reference_trainer.parallel_dims import ParallelDims


class Root(msgspec.Struct):
    """Groups that a root drives, with the state on which their memory depends."""

    groups: list[str]
    """Groups in the order in which forward enters them; none for a stage of another rank."""
    last: str = ""
    """Group that forward leaves last: an outer group is left after its inner groups."""
    order: ForwardOrder = msgspec.field(default_factory=ForwardOrder)
    """Order in which forwards have left the groups, with those of an evaluation before."""
    in_backward: set[str] = set()
    """Groups that a backward has entered and not left."""
    copied_out: str = ""
    """Output of the all-gather that the last group in forward has copied out."""

    def leave(self, group: str, *, is_stage: bool = False) -> None:
        """Note that forward has left a group; one that a stage had left before begins another forward."""
        if is_stage and group in self.order.left:
            self.order.clear()
        self.order.leave(group)


def roots(config: TrainerConfig, held: Collection[str]) -> list[Root]:
    """Return the roots by the number of their stage, a single one without a pipeline; `held` are a rank's groups."""
    order = left(groups(config))
    among = (pipeline.groups_of(stage, config) for stage in range(len(pipeline.owners(config))))
    present = ([name for name in names if name in held] for names in among)
    return [Root(names, max(names, key=order.index, default="")) for names in present]


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
    order: float, parameters: int, replicated_over_tp: int, meshes: Sequence[int], traits: VersionTraits
) -> int:
    """Return the number of scalars: norms, the norms in a stack, and reductions of the stack over the mesh.

    `meshes` are the sizes of the mesh's dimensions over which gradients are sharded. The inf-norm is that of local
    shards, of which the trainer reduces one number (`reference_trainer/clip.py`). Up to torch 2.9 the stack is left
    pending. The norm of a parameter that is replicated over tensor-parallel ranks is then put into the stack as a
    partial sum.
    """
    if order == math.inf:
        return 2 * parameters
    if not traits.norms_reduced_one_by_one:
        return 2 * parameters + replicated_over_tp
    reductions = sum(size > 1 for size in meshes)
    return parameters * (2 + (2 + reductions if reductions else 0))


KINDS = {
    "gradients": ("G", "B", "L", "last", "cut", "partial"),
    "unsharded parameters": ("U", "P"),
    "communication buffers": ("A", "C", "I", "O"),
}
"""Kinds of memory, with the buffers above that belong to them."""


class Usage(msgspec.Struct):
    """Peak and final bytes of one phase."""

    peak_bytes: int = 0
    end_bytes: int = 0
    kinds_at_peak: dict[str, int] = {}
    """Bytes at the peak by kind: `KINDS`, `activations` and `temporaries`. Empty if the memory was measured."""
    most_by_buffer: dict[str, int] = {}
    """Most bytes at any time by buffer (`A`, `U`, ...), of all groups. Empty if the memory was measured."""
    end_by_buffer: dict[str, int] = {}
    """Bytes at the end by buffer, of all groups."""


class Walk:
    """Walk through one step of one rank: buffers that are held, by name, and the memory of each phase."""

    def __init__(
        self,
        config: TrainerConfig,
        dims: ParallelDims,
        shapes: Shapes,
        traits: VersionTraits,
        *,
        shard_rank: int = 0,
        kernels: bool = True,
        device_only: bool = False,
    ) -> None:
        self.phases: dict[str, Usage] = {}
        self._kernels = int(kernels)
        self._offloads = device_only and config.offload != "none"
        """True if reduced gradients and the optimizer are in uncounted memory."""
        self._config, self._dims, self._traits = config, dims, traits
        policy = dtype_policy(config.precision)
        self._compute, self._reduce, self._master = (
            int(getattr(torch, name).itemsize) for name in (policy.compute, policy.reduce, policy.sharded)
        )
        gradients = trained(shapes, config)
        self._by_mesh = ByMesh.of(gradients, config, dims)
        self._optimizer_groups: tuple[list[int], list[int]] = ([], [])
        """Elements of the rank's shards of matrices, and of vectors, in the order of the optimizer; without padding."""
        self._is_stage = config.mesh.pp > 1
        self._parameters: dict[str, list[Sharding]] = {}
        """Parameters by group."""
        self._trained: dict[str, list[Sharding]] = {}
        """Parameters with gradients by group, also of groups without any."""
        for name, sharding in shardings(shapes, config, shards=dims.dp_shard).items():
            self._parameters.setdefault(sharding.group, []).append(sharding)
            self._trained.setdefault(sharding.group, [])
            if name not in gradients:
                continue
            self._trained[sharding.group].append(sharding)
            self._optimizer_groups[0 if len(shapes[name]) > 1 else 1].append(sharding.own(shard_rank))
        self._ranks = {group: parameters[0].ranks for group, parameters in self._parameters.items()}
        """Ranks that shard each group."""
        self._gradient_shard = {group: sum(p.shard for p in each) for group, each in self._trained.items()}
        self._roots = roots(config, self._parameters)
        self._held: dict[str, int] = {}
        self._phase = "forward"
        self._model_bytes = self._gradients_bytes = self._wide_gradients_bytes = 0
        self._reduces = self._all_reduces = True
        self._begun = 0
        """Number of micro-batches whose forward has begun."""
        self._passed = Counter[str]()
        """Number of forward passes of a backward that it has walked back through, by group."""

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
        usage.end_by_buffer = sums((name.split()[0], nbytes) for name, nbytes in self._held.items())
        for buffer, nbytes in usage.end_by_buffer.items():
            usage.most_by_buffer[buffer] = max(nbytes, usage.most_by_buffer.get(buffer, 0))
        if usage.end_bytes + extra > usage.peak_bytes:
            usage.peak_bytes = usage.end_bytes + extra
            activations = self._model_bytes + self._held.get("tokens", 0)
            usage.kinds_at_peak = self._by_kind() | {"activations": activations, "temporaries": extra}

    def _by_kind(self) -> dict[str, int]:
        held = [(name.split()[0], nbytes) for name, nbytes in self._held.items()]
        return {kind: sum(nbytes for name, nbytes in held if name in names) for kind, names in KINDS.items()}

    # Phases

    def micro_batches(self, profile: Sequence[MemorySegment]) -> None:
        """Walk through forward and backward of all micro-batches; `profile` has their segments without FSDP."""
        if self._is_stage:
            self._held["tokens"] = self._tokens_bytes()
        if pipeline.gathers_ahead(self._config):
            self._gather_ahead(profile)
        for segment in profile:
            self._model_bytes = segment.start_bytes
            match segment.mark.split():
                case ["stage", index]:
                    self._wait_for_gathers(int(index))
                case ["evaluate"]:
                    self._phase = "evaluate"
                case ["forward"]:
                    self._begin_micro_batch(self._begun)
                    self._begun += 1
                case ["reduce"]:
                    self._reduces = self._all_reduces = True
                case ["backward"]:
                    self._phase = "backward"
                case ["end"]:
                    self._end_of_backward()
                case ["forward", group]:
                    self._forward(group)
                case ["after-forward", group]:
                    self._after_forward(group)
                case ["backward", group]:
                    self._backward(group)
                case ["gradients", _]:
                    self._gradients_bytes = segment.start_bytes - segment.end_bytes
                case ["wide-gradients", _]:
                    self._wide_gradients_bytes = segment.start_bytes - segment.end_bytes
                case ["freed", group]:
                    self._after_backward(group)
            self._note(segment.peak_bytes - segment.start_bytes)
            self._model_bytes = segment.end_bytes
            self._note()
        self._model_bytes = 0
        self._held.pop("tokens", None)
        self._note()

    def _tokens_bytes(self) -> int:
        """Return the bytes of inputs and labels: the trainer puts those of a step's micro-batches into one tensor."""
        data = self._config.data
        return 2 * data.global_batch_size // self._dims.sample_groups * data.seq_len * torch.int64.itemsize

    def _begin_micro_batch(self, index: int) -> None:
        self._phase = "forward"
        # A pipeline reduces when all micro-batches are over, see `reduce`.
        self._reduces, self._all_reduces = (False, False) if self._is_stage else communicates(self._config, index)

    def _gather_ahead(self, profile: Sequence[MemorySegment]) -> None:
        """Gather all groups of the rank's stages, in the order in which the stages act first."""
        self._phase = "data"
        stages = [int(segment.mark.split()[1]) for segment in profile if segment.mark.startswith("stage ")]
        for stage in dict.fromkeys(stages):
            for group in self._roots[stage].groups:
                self._unshard(group)

    def _wait_for_gathers(self, stage: int) -> None:
        """Copy out the groups gathered ahead for a stage that begins to act, and free the outputs of their gathers."""
        for group in self._roots[stage].groups:
            if f"A {group}" in self._held:
                self._copy_out(group)
                self._free(f"A {group}")

    def after_backward(self) -> None:
        """Walk through clipping, which works in place, and the optimizer's step.

        Implementation `auto` is torch's choice on the CPU, a loop. On a device the caller has to name `foreach`.
        """
        self._phase = "clip"
        self._note(self._scalars_of_norms() * torch.float32.itemsize)
        self._phase = "optimizer"
        self._note()
        if not self._offloads:
            for numel in optimizer_temporaries(self._config.optimizer, *self._optimizer_groups):
                self._note(numel * self._master)
        self._free_all([name for name in self._held if name.startswith("G ")])
        self._phase = "idle"
        self._note()

    def _scalars_of_norms(self) -> int:
        """Return the most scalars at once: clipping takes the norms of one mesh after those of the other."""
        dims, by_mesh = self._dims, self._by_mesh
        replicated = sum(sharded_dim(name) is None for name in by_mesh.others) if dims.tp > 1 else 0
        experts = (dims.dp_shard // dims.ep, dims.ep, dims.tp)
        meshes = (
            (by_mesh.others, replicated, (dims.dp_shard, dims.tp)),
            (by_mesh.norms, 0, (dims.dp_shard,)),
            (by_mesh.experts, 0, experts),
        )
        order, traits = self._config.optimizer.norm_order, self._traits
        return max(scalars_of_norms(order, len(names), pending, sizes, traits) for names, pending, sizes in meshes)

    # Points in time of a group

    def _root_of(self, group: str) -> Root:
        return next(root for root in self._roots if group in root.groups)

    def _forward(self, group: str) -> None:
        self._unshard(group)
        if f"U {group}" not in self._held:
            root = self._root_of(group)
            previous, root.copied_out = root.copied_out, f"A {group}"
            if not self._traits.previous_gather_until_copied:
                self._free(previous)
            self._copy_out(group)
            self._free(previous)
        for other in prefetched_in_forward(group, self._config):
            self._unshard(other)

    def _after_forward(self, group: str) -> None:
        root = self._root_of(group)
        if self._phase == "backward" and not self._traits.recomputation_reshards:
            # Backward needs the group next. To FSDP a recomputed forward begins, and is over, with this group.
            self._free(root.copied_out)
            return
        root.leave(group, is_stage=self._is_stage)
        ranks = ranks_after_forward(group, self._config)
        if ranks > 1:
            self._reshard_to(ranks, group)
        if ranks != 1:
            self._free(f"U {group}")
        if group == root.last:  # the root's forward is over
            self._free(root.copied_out)

    def _reshard_to(self, ranks: int, group: str) -> None:
        """Parameter by parameter: a shard is copied, and the unsharded parameter freed."""
        for parameter in self._parameters[group]:
            unsharded = parameter.padded * self._compute
            self._hold(f"P {group}", unsharded // ranks)
            self._held[f"U {group}"] -= unsharded

    def _backward(self, group: str) -> None:
        self._unshard(group)
        self._copy_out(group)
        self._free(f"A {group}")
        listed = prefetched_in_backward(group, left(groups(self._config)), self._config.backward_prefetch)
        for other in listed or self._recorded_before(group):
            self._unshard(other)
        self._root_of(group).in_backward.add(group)

    def _recorded_before(self, group: str) -> list[str]:
        """Return the group that is prefetched by the recorded order, once until backward leaves the group."""
        root = self._root_of(group)
        return [] if group in root.in_backward else root.order.take(group, keeps=self._is_stage)

    def _after_backward(self, group: str) -> None:
        self._root_of(group).in_backward.discard(group)
        is_complete = self._is_complete(group)
        self._hold("B", self._gradients_bytes + self._wide_gradients_bytes)
        if f"L {group}" in self._held:
            self._add_up(group)
        elif self._reduces:
            self._take_own_shard(group)
        if self._reduces or not self._is_stage:  # a stage keeps what its next micro-batches need
            self._free(f"U {group}")
        if not self._reduces:
            self._set_aside(group)
            self._free("B")
            return
        self._free_all([name for name in self._held if name.startswith("I ")])
        waits = not is_complete and not self._held["B"] and f"L {group}" not in self._held
        if waits or not self._trained[group]:
            self._free("B")
            return
        self._put_columns_together(group)
        self._hold(f"I {group}", self._gradient_shard[group] * self._ranks[group] * self._reduce)
        self._note(self._copies_to_fill(group))
        if self._ranks[group] > 1 and self._traits.last_gradient_until_reduced:
            self._keep_last_gradient(group)
        self._free("B")
        self._free(f"L {group}")
        self._reduce_gradients(group)
        self._free("last gradient")
        self._free("cut")

    def _is_complete(self, group: str) -> bool:
        """Return whether backward, which leaves a group, has walked back through all passes that compute the group.

        There are none of a block that all of them leave out.
        """
        together = passes_of(group, self._config, self._begun - 1)
        if self._config.passes == 1 or not together:
            return bool(together)
        trained = [name for name, parameters in self._trained.items() if parameters]
        leaves = [leaves_in_backward(group, self._config, trained, micro_batch) for micro_batch in together]
        self._passed[group] += 1
        is_complete = self._passed[group] == sum(leaves) + (not leaves[0])
        if is_complete:
            self._passed[group] = 0
        return is_complete

    def _put_columns_together(self, group: str) -> None:
        """Copy the gradient of each parameter that is sharded by columns, so that each rank's part is contiguous.

        The gradient is freed when the next one is cut; up to torch 2.14 a variable holds the last one until the group
        is reduced, see `VersionTraits.last_gradient_until_reduced` (`chunks` there).
        """
        itemsize = self._compute if self._held["B"] else self._reduce
        columns = [parameter.numel * itemsize for parameter in self._trained[group] if parameter.by_columns]
        if columns:
            self._note(max(columns))
            if self._traits.last_gradient_until_reduced:
                self._held["cut"] = columns[-1]

    def _add_up(self, group: str) -> None:
        """Parameter by parameter: the gradient is cast, added to the gradient that waits, and freed."""
        for gradient in self._gradients(group):
            self._note(gradient * self._reduce // self._compute * self._kernels)
            self._held["B"] -= gradient

    def _set_aside(self, group: str) -> None:
        """Parameter by parameter: the gradient is cast and freed. Gradients of postponed reductions are only kept."""
        for gradient in self._gradients(group) if self._held["B"] else ():
            self._hold(f"L {group}", gradient * self._reduce // self._compute)
            self._held["B"] -= gradient

    def _gradients(self, group: str) -> list[int]:
        """Bytes of each gradient in B. The embedding's has the full vocabulary on each tensor-parallel rank."""
        numel = sum(parameter.numel for parameter in self._trained[group])
        return [self._held["B"] * parameter.numel // numel for parameter in self._trained[group]]

    def _copies_to_fill(self, group: str) -> int:
        """Bytes that the CPU needs in addition to gradients and I.

        `_chunk_cat` copies all gradients that need padding, and if it has to cast, each gradient, one after the other.
        Gradients of two dtypes are cast before (`chunk_cat_mixed_dtype`), and held together.
        """
        sizes = [parameter.padded for parameter in self._trained[group]]
        padded = sum(parameter.padded for parameter in self._trained[group] if parameter.padded != parameter.numel)
        if self._reduce == self._compute or f"L {group}" in self._held:
            return padded * self._reduce * self._kernels
        if self._wide_gradients_bytes:
            return padded * self._reduce * self._kernels + self._gradients_bytes * self._reduce // self._compute
        return (padded + max(sizes)) * self._compute * self._kernels

    def _take_own_shard(self, group: str) -> None:
        """A rank takes its shard of the embedding's gradient, of which it has computed a term of full size."""
        own = sum(parameter.numel for parameter in self._trained[group]) * self._compute
        if self._held["B"] > own and not self._wide_gradients_bytes:
            self._note(own)
            self._held["B"] = own

    def _keep_last_gradient(self, group: str) -> None:
        """Hold the last gradient of a group, see `VersionTraits.last_gradient_until_reduced`."""
        if self._trained[group][-1].by_columns:  # its variable holds what has been cut
            return
        among, itemsize = ("B", self._compute) if self._held["B"] else (f"L {group}", self._reduce)
        last = min(self._trained[group][-1].numel * itemsize, self._held.get(among, 0))
        self._held["last gradient"] = last
        self._held[among] = self._held.get(among, 0) - last

    def _reduce_gradients(self, group: str) -> None:
        shard = self._gradient_shard[group]
        output, gradient = shard * self._reduce, shard * self._master
        self._hold("O", output)
        if self._ranks[group] == 1 and self._has_own_factor(group):
            self._note(output)  # the quotient, which a group of one shard copies to O
        if not self._all_reduces:
            self._held[f"partial {group}"] = output
            self._free("O")
            return
        if self._reduce == self._master:
            if f"G {group}" in self._held and self._dims.dp_replicate > 1:
                self._held[f"O {group}"] = output
            self._free("O")
            self._keep_reduced(group, gradient)
            self._free(f"partial {group}")
            return
        self._note(gradient)
        if self._dims.dp_replicate > 1:
            self._held[f"O {group}"] = self._held["O"]
        self._free("O")
        self._keep_reduced(group, gradient)
        self._free(f"partial {group}")  # which `foreach_reduce` holds until it returns

    def _has_own_factor(self, group: str) -> bool:
        """Return whether gradients are divided by a number of the trainer's, as those of experts on a mesh are."""
        return self._config.gradient_divisor is not None or self._parameters[group][0].ep > 1

    def _keep_reduced(self, group: str, gradient: int) -> None:
        if not self._offloads:
            self._held[f"G {group}"] = gradient
        self._note()

    def _end_of_backward(self) -> None:
        if self._is_stage:
            self._reduces = self._all_reduces = False
        else:
            for root in self._roots:
                root.order.clear()
            # Of a group that was prefetched after its backward, since an evaluation had left it before.
            self._free_all([name for name in self._held if name.startswith("A ")])
        self._free_all([name for name in self._held if name.startswith(("I ", "O "))])

    # Buffers

    def _unshard(self, group: str) -> None:
        if f"U {group}" in self._held or f"A {group}" in self._held:
            return
        ranks = ranks_after_forward(group, self._config) if f"P {group}" in self._held else self._ranks[group]
        if ranks == 1:
            return
        for parameter in self._parameters[group]:
            if parameter.in_float8:
                self._cast_to_float8(parameter.padded // ranks)
        wide = sum(parameter.padded for parameter in self._parameters[group] if not parameter.in_float8)
        self._hold("C", wide // ranks * self._compute if self._compute != self._master else 0)
        self._hold(f"A {group}", self._gathered_bytes(group))
        self._free("C")

    def _cast_to_float8(self, shard: int) -> None:
        """A shard is scaled in fp32, clamped, and cast; shards of other weights that were cast before stay.

        Source: torchao/float8/fsdp_utils.py, `fsdp_pre_all_gather`, which FSDP calls weight by weight.
        """
        self._note(2 * shard * torch.float32.itemsize)
        self._hold("C", shard)
        self._note(2 * shard * torch.float32.itemsize)

    def _copy_out(self, group: str) -> None:
        if f"U {group}" in self._held:
            return
        if self._ranks[group] == 1 and self._compute != self._master:
            self._cast_one_by_one(group)
        self._hold(f"U {group}", self._gathered_bytes(group))
        self._note(sum(p.gathered_bytes(self._compute) for p in self._parameters[group] if p.by_columns))
        self._free(f"P {group}")

    def _cast_one_by_one(self, group: str) -> None:
        """One rank copies the cast of each parameter, and frees it when it has cast the next.

        Source: FSDPParamGroup.wait_for_unshard, which names the cast of one parameter until it has that of the next.
        """
        copied = previous = 0
        for parameter in self._parameters[group]:
            cast = parameter.gathered_bytes(self._compute)
            self._note(copied + previous + cast)
            copied += cast
            self._note(copied + cast)
            previous = cast

    def _free_all(self, names: Sequence[str]) -> None:
        for name in names:
            self._free(name)

    def _gathered_bytes(self, group: str) -> int:
        """Bytes of a group's unsharded parameters, with padding."""
        return sum(parameter.gathered_bytes(self._compute) for parameter in self._parameters[group])


def sums(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sum of the numbers of each name."""
    total: dict[str, int] = {}
    for name, number in items:
        total[name] = total.get(name, 0) + number
    return total
