"""Memory that a model, or the stages of a pipeline, need without FSDP: activations, and gradients of unsharded size.

The memory models of `conformance.oracles` add the allocations of FSDP. Stages act in the order of a schedule.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.tensor import DTensor

from conformance.experiments.context import RankWorld, experiment, simulated_world
from conformance.instruments.activations import GroupMarks, Groups
from conformance.instruments.device_memory import ledger_of
from conformance.instruments.memory import Ledger, mark
from conformance.memory_segment import MemorySegment
from conformance.oracles import pipeline
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.expert_routing import route_evenly
from conformance.oracles.frozen import at_step
from conformance.oracles.memory_model import MEASURED_STEP
from conformance.oracles.pipeline import Action
from conformance.oracles.schedule import communicates, spans_model
from conformance.oracles.torch_versions import gradients_stay, traits_of
from conformance.run.experiment import Needs
from reference_trainer.config import TrainerConfig
from reference_trainer.context_parallel import ContextParallel
from reference_trainer.data import Batches
from reference_trainer.float8 import apply_float8
from reference_trainer.frozen import freeze
from reference_trainer.init_weights import init_weights
from reference_trainer.loss import loss_context, summed_loss, with_balance
from reference_trainer.mesh import build_expert_mesh, build_mesh
from reference_trainer.mixed_precision import mixed_precision_policy
from reference_trainer.model import Stage, StageLayers, Transformer
from reference_trainer.parallel_dims import ParallelDims
from reference_trainer.parallelize import apply_ac, apply_ep, apply_tp
from reference_trainer.skipped import skip


@experiment(needs=Needs.NOTHING, world="none")
def profile_without_fsdp(rank: RankWorld) -> list[MemorySegment]:
    """Profile the model of a cell without FSDP, in one process; returns the result of `segments_without_fsdp`.

    With tensor, expert or context parallelism the process is rank 0 of a simulated world of its ranks.
    """
    return _profile_of_context_rank(rank, 0)


@experiment(needs=Needs.NOTHING, world="ring")
def profile_context_without_fsdp(rank: RankWorld) -> list[MemorySegment]:
    """Profile the model as `profile_without_fsdp` does, on this one of the ranks that share samples.

    In their turns of a ring they do not see equally many keys. Each has a process: DTensor takes the process group of
    an equal mesh from its cache, and tensor-parallel ranks of two worlds that one process simulates have equal meshes.
    """
    return _profile_of_context_rank(rank, rank.rank)


def _profile_of_context_rank(rank: RankWorld, cp_rank: int) -> list[MemorySegment]:
    config, dims = rank.config, rank.dims
    with simulated_world(dims.tp * dims.ep * dims.cp, rank=cp_rank * dims.tp, device_type=rank.device.type):
        model = Transformer(config.model)
        init_weights(model, seed=config.seed)
        route_evenly(model)
        parallelize_without_fsdp(model.to(rank.device), config, rank.device, tp=rank.dims.tp)
        batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
        shards = shards_without_fsdp(config, dims, rank.device)
        return segments_without_fsdp(model, batches, config, dims, shards, ledger=lambda: ledger_of(rank.device))


Shards = Callable[[Transformer, Tensor, Tensor], AbstractContextManager[tuple[Tensor, Tensor]]]
"""Context of a rank's part of inputs and labels, in which the model runs forward and backward."""


def shards_without_fsdp(config: TrainerConfig, dims: ParallelDims, device: torch.device) -> Shards:
    """Return the contexts of a simulated world of the ranks that share samples; without such ranks parts are whole."""
    if dims.cp == 1:
        return lambda _model, inputs, labels: nullcontext((inputs, labels))
    among = ParallelDims(dp_replicate=1, dp_shard=dims.cp, tp=dims.tp, cp=dims.cp)
    return ContextParallel(config, among, device).shards


def parallelize_without_fsdp(model: Transformer, config: TrainerConfig, device: torch.device, *, tp: int) -> None:
    """Cast parameters to the compute dtype, and apply to the model, in place, all that the trainer does but FSDP."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(mixed_precision_policy(config.precision).param_dtype)
    if config.float8 != "none":
        for block in model.blocks.values():
            apply_float8(block, config.float8, device.type)
            _gather_in_float8(block)
    if tp > 1:
        among = ParallelDims(dp_replicate=1, dp_shard=config.mesh.cp, tp=tp)
        apply_tp(model, build_mesh(among, device)["tp"], config)
    if config.model.n_experts and (tp > 1 or config.mesh.ep > 1):
        among = ParallelDims(dp_replicate=1, dp_shard=config.mesh.ep, tp=tp, ep=config.mesh.ep)
        mesh, expert_mesh = build_mesh(among, device), build_expert_mesh(among, device)
        for mixture in model.mixtures:
            apply_ep(mixture, mesh, expert_mesh if config.mesh.ep > 1 else None)
    for block in model.blocks.values():
        if config.activation_checkpointing != "none":
            apply_ac(block, mode=config.activation_checkpointing)
    freeze(model, config.frozen)


def _gather_in_float8(block: nn.Module) -> None:
    """Gather weights that FSDP gathers in float8 as FSDP does, see `FSDPParam.init_unsharded_param`.

    `fsdp_pre_all_gather` and `fsdp_post_all_gather` are the protocol of FSDP's extensions.
    """
    for module in block.modules():
        weight: Any = getattr(module, "weight", None)
        if hasattr(weight, "fsdp_pre_all_gather"):
            with torch.no_grad():
                shards, scale = weight.fsdp_pre_all_gather(None)
                gathered, _ = weight.fsdp_post_all_gather(shards, scale, weight.dtype)
            module.weight = nn.Parameter(gathered)


def segments_without_fsdp(
    model: Transformer, batches: Batches, config: TrainerConfig, dims: ParallelDims, shards: Shards, *, ledger: Ledger
) -> list[MemorySegment]:
    """Measure forward, loss and backward of each micro-batch after a warm step; marks as in `instruments.activations`.

    Gradients have the dtypes that FSDP gives them in this version of torch, and are kept for as many micro-batches.
    """
    traits, config = traits_of(str(torch.__version__)), at_step(config, MEASURED_STEP)
    marks = GroupMarks(group_modules(model, spans=spans_model(config), experts=config.mesh.ep > 1))
    micro_batches = batches.micro_batches(0, dp_rank=0, dp_size=dims.sample_groups, accumulation=config.accumulation)
    for _warm in (True, False):
        with ledger() as measured:
            waiting: list[Tensor] = []
            for index, (inputs, labels) in enumerate(micro_batches):
                if index and config.evaluation != "none":
                    _evaluate(model, config, shards, *micro_batches[index - 1])
                skip(model, config.skipped, forward=index)
                reduces, _ = communicates(config, index)
                marks.reduces = reduces
                marks.releases = reduces or not gradients_stay(config, traits)
                if traits.gradients_have_own_dtypes and config.implementation == "fsdp2":
                    set_grad_dtypes(model, config, reduces=reduces)
                _forward_backward(model, marks, config, shards, inputs, labels, waiting)
    return measured.segments


def set_grad_dtypes(model: nn.Module, config: TrainerConfig, *, reduces: bool) -> None:
    """Set `grad_dtype` before backward as FSDP does if gradients are reduced in a wider dtype.

    See `_set_unsharded_grad_dtypes` of torch 2.15, torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py. Gradients
    keep the dtype in which they are computed, and are added to existing gradients. The gradients of the first of
    several micro-batches, and those that tensor parallelism may have to reduce, are cast at once.
    """
    policy = mixed_precision_policy(config.precision)
    reduce_dtype = policy.reduce_dtype or torch.float32  # the default of 2.15, see `oracles.dtype_policy`
    if policy.param_dtype in (None, reduce_dtype):
        return
    for parameter in model.parameters():
        first = parameter.grad is None and not reduces
        replicated = isinstance(parameter, DTensor) and any(where.is_replicate() for where in parameter.placements)
        parameter.grad_dtype = reduce_dtype if first or replicated else None


@torch.no_grad()
def _evaluate(model: Transformer, config: TrainerConfig, shards: Shards, inputs: Tensor, labels: Tensor) -> None:
    device = model.output.weight.device
    mark("evaluate")
    with (
        loss_context(parallel=config.loss_parallel and config.mesh.tp > 1),
        shards(model, inputs, labels) as (own_inputs, own_labels),
    ):
        summed_loss(model(own_inputs.to(device)), own_labels.to(device), arithmetic=config.model.arithmetic)


def _forward_backward(
    model: Transformer,
    marks: GroupMarks,
    config: TrainerConfig,
    shards: Shards,
    inputs: Tensor,
    labels: Tensor,
    waiting: list[Tensor],
) -> None:
    """Run forward of a micro-batch, and backward if it is the last of several passes.

    Its logits and all losses are held until backward ends, as in the trainer.
    """
    device = model.output.weight.device
    mark("forward")
    with (
        loss_context(parallel=config.loss_parallel and config.mesh.tp > 1),
        shards(model, inputs, labels) as (own_inputs, own_labels),
    ):
        logits = model(own_inputs.to(device))
        loss = summed_loss(logits, own_labels.to(device), arithmetic=config.model.arithmetic)
        if config.model.n_experts:
            loss = with_balance(loss, model.balance_loss(), tp=config.mesh.tp)
        waiting.append(loss)
        if len(waiting) < config.passes:
            return
        mark("backward")
        torch.autograd.backward(waiting)
        waiting.clear()
    marks.finish_backward()
    mark("end")


def group_modules(model: Transformer | Stage, *, spans: bool = False, experts: bool = False) -> Groups:
    """Return the modules of each group that FSDP shards, see `oracles.schedule.groups`.

    `spans` says whether embedding, norm and output are one group, `experts` whether those of a block are one.
    """
    blocks: dict[str, list[nn.Module]] = {}
    for index, block in model.layers.items():
        blocks[f"layers.{index}"] = [block]
        if experts:
            blocks[f"layers.{index}.feed_forward.experts"] = [block.get_submodule("feed_forward.experts")]
    if spans:
        return {"output": [model.tok_embeddings, model.norm, model.output], **blocks}
    groups: dict[str, list[nn.Module]] = {"tok_embeddings": [model.tok_embeddings], **blocks}
    groups["output"] = [model.norm, model.output]
    return {name: modules for name, modules in groups.items() if not isinstance(modules[0], nn.Identity)}


_MEASURED = "measured step"


@experiment(needs=Needs.NOTHING, world="none")
def profile_stages_without_fsdp(rank: RankWorld) -> list[list[MemorySegment]]:
    """Profile the stage of each rank of a cell's pipeline without FSDP, in one process.

    Marks are those of `instruments.activations`, and `reduce` after the last backward. With tensor parallelism the
    process is rank 0 of a simulated world of tensor-parallel ranks.
    """
    with simulated_world(rank.dims.tp):
        return [_profile(rank, pp_rank) for pp_rank in range(rank.dims.pp)]


def _profile(rank: RankWorld, pp_rank: int) -> list[MemorySegment]:
    config = rank.config
    held = {index: _held(index, config) for index in pipeline.stages_of(pp_rank, config)}
    model = Transformer(config.model, list(held.values()))
    init_weights(model, seed=config.seed)
    parallelize_without_fsdp(model.to(rank.device), config, rank.device, tp=rank.dims.tp)
    batches = Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    micro_batches = batches.micro_batches(0, dp_rank=0, dp_size=rank.dims.dp, accumulation=config.accumulation)
    stages = {
        index: _Stage(module, layers, config, rank.dims, micro_batches, rank.device)
        for (index, layers), module in zip(held.items(), model.stages, strict=True)
    }
    for index, stage in stages.items():
        stage.previous, stage.next = stages.get(index - 1), stages.get(index + 1)
    actions = pipeline.order(config, rank=pp_rank)
    with ledger_of(rank.device) as ledger:
        _run(stages, actions, config)
        mark(_MEASURED)
        _run(stages, actions, config)
    begin = next(index for index, segment in enumerate(ledger.segments) if segment.mark == _MEASURED)
    return [segment.above(ledger.segments[begin].start_bytes) for segment in ledger.segments[begin:]]


def _held(index: int, config: TrainerConfig) -> StageLayers:
    layers = pipeline.layers_of(index, config)
    return StageLayers(
        range(layers[0], layers[-1] + 1), first=index == 0, last=index == len(pipeline.owners(config)) - 1
    )


def _run(stages: Mapping[int, "_Stage"], actions: Sequence[Action], config: TrainerConfig) -> None:
    """Run the actions of a rank, and release the gradients of each stage after its last backward."""
    for stage in stages.values():
        stage.clear()
    for action, ends_stage in pipeline.with_ends(actions, config):
        mark(f"stage {action.stage}")
        mark("forward" if action.kind == "forward" else "backward")
        stage = stages[action.stage]
        act = {
            "forward": stage.forward,
            "backward": stage.backward,
            "backward-input": stage.backward_of_input,
            "backward-weight": stage.backward_of_parameters,
        }
        act[action.kind](action.micro_batch)
        if ends_stage:
            stage.reduce()


class _Stage:
    """Stage that keeps the tensors that a schedule of torch.distributed.pipelining keeps for it.

    That is, of each micro-batch between its forward and its backward, the output, its graph and its loss; between the
    halves of a backward the output, or the loss, and the tensors of `backward_of_input`; and buffers for all received
    micro-batches, which are there before the step. Schedules with one stage on each rank also hold the output of the
    last forward and the gradient that was sent last, in local variables (`_step_microbatches` in
    torch/distributed/pipelining/schedules.py); those with several do not (`_perform_action` there).
    """

    def __init__(
        self,
        module: Stage,
        held: StageLayers,
        config: TrainerConfig,
        dims: ParallelDims,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        device: torch.device,
    ) -> None:
        self._module, self._held, self._config, self._device = module, held, config, device
        self._micro_batches = micro_batches
        self._marks = GroupMarks(group_modules(module))
        self._traits = traits_of(str(torch.__version__))
        numel = pipeline.activation_numel(config, dims)
        shape = (len(micro_batches[0][0]), numel // len(micro_batches[0][0]) // config.model.dim, config.model.dim)
        dtype = getattr(torch, dtype_policy(config.precision).compute)
        buffers = [[torch.zeros(shape, dtype=dtype, device=device) for _ in micro_batches] for _ in range(2)]
        self.inputs, self.gradients = buffers
        self.previous: _Stage | None = None
        self.next: _Stage | None = None
        """Neighbours on the same rank, which get tensors directly instead of by a send."""
        self._outputs: dict[int, Tensor] = {}
        self._branches: dict[int, list[Branch]] = {}
        self._losses: dict[int, Tensor] = {}
        self._keeps_last = pipeline.has_one_stage(config)
        self._last_output: Tensor | None = None
        self._last_gradient: Tensor | None = None
        self._keep_gradients()

    def _keep_gradients(self) -> None:
        self._marks.reduces, self._marks.releases = False, not gradients_stay(self._config, self._traits)

    def clear(self) -> None:
        """Release the gradients of inputs that an earlier step has left, see `VersionTraits.halves_keep_gradients`."""
        for x in self.inputs:
            x.grad = None

    def forward(self, index: int) -> None:
        """Compute the output of a micro-batch, and on the last stage its loss."""
        tokens, labels = self._micro_batches[index]
        x = tokens.to(self._device) if self._held.first else self.inputs[index].requires_grad_()
        output = self._module(x)
        self._outputs[index] = output
        if self._keeps_last:
            self._last_output = output
        if self._held.last:
            with loss_context(parallel=self._config.loss_parallel and self._config.mesh.tp > 1):
                arithmetic = self._config.model.arithmetic
                self._losses[index] = summed_loss(output, labels.to(self._device), arithmetic=arithmetic)
        if self.next:
            self.next.inputs[index] = output.detach()

    def backward_of_input(self, index: int) -> None:
        """Compute the gradient of a micro-batch's input; the first stage, which needs none, does nothing."""
        if self._held.first:
            return
        x, output = self.inputs[index], self._outputs.pop(index)
        root, gradient = (self._losses.pop(index), None) if self._held.last else (output, self.gradients[index])
        with loss_context(parallel=self._config.loss_parallel and self._config.mesh.tp > 1):
            input_gradient, self._branches[index] = backward_of_input(root, gradient, x, self._module.parameters())
        self._outputs[index] = root
        if self._traits.halves_keep_gradients:
            x.grad = input_gradient
        if self.previous:
            self.previous.gradients[index] = input_gradient
        self._marks.finish_backward()
        mark("end")

    def backward_of_parameters(self, index: int) -> None:
        """Compute the gradients that `backward_of_input` has left; of the first stage, all."""
        if self._held.first:
            self.backward(index)
            return
        output = self._outputs.pop(index)
        backward_of_parameters(self._branches.pop(index), copies=self._traits.halves_copy_gradients)
        del output  # held until now

    def backward(self, index: int) -> None:
        """Compute the gradients of a micro-batch."""
        if self._traits.gradients_have_own_dtypes:
            set_grad_dtypes(self._module, self._config, reduces=False)
        if self._config.pipeline.schedule == "gpipe":  # it receives into the variable from which it has sent
            self._last_gradient = None
        output = self._outputs.pop(index)
        if self._held.last:
            with loss_context(parallel=self._config.loss_parallel and self._config.mesh.tp > 1):
                torch.autograd.backward(self._losses.pop(index))
        else:
            torch.autograd.backward(output, self.gradients[index])
        if not self._held.first:
            self._last_gradient, self.inputs[index].grad = self.inputs[index].grad, None
        self._marks.finish_backward()
        mark("end")
        if not self._keeps_last:
            self._last_gradient = None

    def reduce(self) -> None:
        """Release the gradients of each group as FSDP does when it reduces them."""
        self._last_output = self._last_gradient = None
        mark("reduce")
        self._marks.reduces = self._marks.releases = True
        self._marks.release_all(backward=self._traits.stages_finalize_backward)
        mark("end")
        self._keep_gradients()


# Backward in two halves, as zero-bubble schedules compute it: the gradient of the input, then those of parameters. The
# first half goes along the paths from the output to the input and keeps the gradient at each node where paths to
# parameters branch off, and the graph below it. The second half goes on from there, one node after another. Written
# after `torch/distributed/pipelining/_backward.py`, whose memory it needs: no more, and no less at any time.


@dataclass
class Branch:
    """Node on a path to the input from which the paths to some parameters branch off."""

    node: Node
    parameters: list[nn.Parameter] = field(default_factory=list)
    gradients: tuple[Tensor | None, ...] = ()
    """Gradients of the node's outputs."""

    def keep(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the gradients that arrive at the node."""
        self.gradients = gradients


def backward_of_input(
    output: Tensor, gradient: Tensor | None, x: Tensor, parameters: Iterable[nn.Parameter]
) -> tuple[Tensor, list[Branch]]:
    """Return the gradient of the leaf `x`, and the input of `backward_of_parameters`; detaches `output` from its graph.

    `gradient` is that of `output`, None for a scalar. Parameters are used once.
    """
    branches = _branches(output, x, parameters)
    hooks = [branch.node.register_prehook(branch.keep) for branch in branches]
    (input_gradient,) = torch.autograd.grad(output, x, gradient, retain_graph=True)
    for hook in hooks:
        hook.remove()
    output.detach_()
    return input_gradient, branches


def backward_of_parameters(branches: list[Branch], *, copies: bool) -> None:
    """Add the gradients of the parameters of each branch to those that they have; empties the list.

    `copies` says whether kept gradients are copied first, see `VersionTraits.halves_copy_gradients`.
    """
    while branches:
        branch = branches.pop(0)
        kept = [(GradientEdge(branch.node, i), g) for i, g in enumerate(branch.gradients) if g is not None]
        edges, gradients = zip(*((edge, g.clone() if copies else g) for edge, g in kept), strict=True)
        computed = torch.autograd.grad(edges, branch.parameters, gradients)
        for parameter, gradient in zip(branch.parameters, computed, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient


def _branches(output: Tensor, x: Tensor, parameters: Iterable[nn.Parameter]) -> list[Branch]:
    """Return the branches in the order of their first parameters."""
    users = _users(get_gradient_edge(output).node)
    on_path = _towards_output(get_gradient_edge(x).node, users)
    branches: dict[Node, Branch] = {}
    for parameter in parameters:
        (node,) = _towards_output(get_gradient_edge(parameter).node, users, until=on_path) & on_path
        branches.setdefault(node, Branch(node)).parameters.append(parameter)
    return list(branches.values())


def _users(root: Node) -> Mapping[Node, list[Node]]:
    """Return of each node of a graph those that hand gradients to it."""
    users, waiting = defaultdict[Node, list[Node]](list), [root]
    while waiting:
        user = waiting.pop()
        for node, _ in user.next_functions:
            if node is not None:
                waiting += [] if node in users else [node]
                users[node].append(user)
    return users


def _towards_output(node: Node, users: Mapping[Node, list[Node]], until: Collection[Node] = ()) -> set[Node]:
    """Return a node and all nodes from it to the output, or to those of `until`, which are included."""
    reached, waiting = {node}, [node]
    while waiting:
        further = [user for user in users[waiting.pop()] if user not in reached]
        reached.update(further)
        waiting += [user for user in further if user not in until]
    return reached
