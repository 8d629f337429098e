"""Options and methods of FSDP2, any three together: a covering array of small trainings.

A small net is trained with the options of each row, and compared with one process in every bit.
"""

import itertools
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.fsdp_net import WIDTH, Net, fsdp_modules
from conformance.instruments.sharding import full
from conformance.run.experiment import Needs
from conformance.sweeps.option_rows import Options, RowSweep
from conformance.sweeps.trials import Ended, Swept, Trials
from reference_trainer.mesh import fsdp_mesh

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "separate_reduce_scatter_group": (False, True),  # first, since with it ranks that do not agree wait longest
    "mesh": ("default", "N x 1", "1 x N"),
    "build": ("in place", "meta"),
    "groups": ("layers", "layers together", "root alone"),
    "shard_placement_fn": ("rows", "columns", "columns of matrices"),
    "reshard_after_forward": (True, False, 2),
    "param_dtype": ("fp32", "bf16"),
    "reduce_dtype": ("default", "fp32"),
    "output_dtype": ("default", "fp32", "bf16"),
    "cast_forward_inputs": (True, False),
    "offload_policy": (False, True),
    "frozen": (False, True),
    "ignored_params": (False, True),
    "gradient_divide_factor": ("default", 8.0),
    "force_sum_reduction_for_comms": (False, True),
    "gradient_sync": ("each", "last", "all-reduce-last"),
    "reshard_after_backward": (True, False),
    "set_is_last_backward": (False, True),
    "unshard": ("no", "waiting", "asynchronous"),
    "modules_to_prefetch": ("default", "forward", "backward"),
    "reduce_scatter_unused_params": (False, True),
    "reduce_scatter_max_input_buffers": (1, 2),
    "load_state_dict": (False, True),
    "no_grad_forward": (False, True),
    "checkpoint": (False, True),
    "forwards_per_step": (1, 2),
    "zero_grad": ("no", "to none", "to zero"),
}
"""Values of each option; the first is the default. A test compares them with the signatures of the installed torch."""

DEFAULTS: Options = {option: values[0] for option, values in OPTIONS.items()}
MICRO_BATCHES = 2
_GROUP_LIMIT = timedelta(seconds=4)
"""Time limit of the process group that FSDP makes for reductions, instead of that of the cell."""
_DTYPES = {"default": None, "fp32": torch.float32, "bf16": torch.bfloat16}


def differences(rank: RankWorld, options: Options, mesh: DeviceMesh) -> dict[str, str]:
    """Train with options; returns the differences from one process, with the number of wrong elements."""
    samples = samples_of(mesh.size()).to(rank.device)
    net = _built(mesh, rank.device, options)
    _set_up(net, options)
    optimizer = torch.optim.SGD(net.parameters())  # never steps
    if options["no_grad_forward"]:
        _evaluate(net, samples[rank.rank], options)
    if options["load_state_dict"]:
        net.load_state_dict({name: -value for name, value in net.state_dict().items()})
    _train(net, samples, rank.rank, options)
    if options["zero_grad"] != "no":
        optimizer.zero_grad(set_to_none=options["zero_grad"] == "to none")
        _train(net, samples, rank.rank, options)
    for module in fsdp_modules(net):
        module.reshard()
    return dict(_differences(net, _single(samples, rank.rank, options), rank.device))


def _differences(net: nn.Module, single: nn.Module, device: torch.device) -> Iterator[tuple[str, str]]:
    for name, parameter in net.named_parameters():
        expected = single.get_parameter(name)
        for kind, measured, wanted in (("parameter", parameter, expected), ("gradient", parameter.grad, expected.grad)):
            if measured is None or wanted is None:
                if measured is not wanted:
                    yield f"{kind} {name}", "there is none" if measured is None else "there is one"
            elif wrong := int((full(measured.to(device)) != wanted.to(device)).sum()):
                yield f"{kind} {name}", f"{wrong} of {wanted.numel()} elements are wrong"
        if parameter.grad is not None and type(parameter.grad.data) is not type(parameter.data):
            yield f"layout of {name}", f"gradient is {type(parameter.grad)}, parameter {type(parameter.data)}"


def _single(samples: Tensor, rank: int, options: Options) -> "SmallNet":
    """Return the net of one process, with the gradients of the mean over ranks, or of the sum over the divide factor.

    An ignored parameter has the gradient of the rank's own samples.
    """
    single, own = (_trained(samples.cpu()[which], options) for which in (slice(None), slice(rank, rank + 1)))
    factor = options["gradient_divide_factor"]
    for parameter in single.parameters():
        if parameter.grad is not None:
            parameter.grad /= len(samples) if factor == "default" else factor
    if options["ignored_params"]:
        single.first.bias.grad = own.first.bias.grad
    return single


def _policy(options: Options, *, is_root: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=None if options["param_dtype"] == "fp32" else torch.bfloat16,
        reduce_dtype=_DTYPES[options["reduce_dtype"]],
        output_dtype=_DTYPES[options["output_dtype"]] if is_root else None,
        cast_forward_inputs=options["cast_forward_inputs"],
    )


def _trained(samples: Tensor, options: Options) -> "SmallNet":
    """Return the net of one process with the gradients of the sum over samples; the spare layer has the first one."""
    net = SmallNet()
    if options["load_state_dict"]:
        for parameter in net.parameters():
            parameter.data.neg_()
    net.first.weight.requires_grad_(not options["frozen"])
    for index in range(MICRO_BATCHES):
        inputs = inputs_of(samples, index)
        loss = net(inputs.flatten(0, 1)).sum()
        if options["reduce_scatter_unused_params"]:
            loss = loss + net.spare(inputs[0]).sum()
        (loss * options["forwards_per_step"]).backward()
    return net


class SmallNet(Net):
    """Net with weights of -1, 0 and 1, which recomputes its layers in backward with `checkpointed`.

    With samples of 0 and 1 all sums over ranks, micro-batches and calls are integers up to 256, which bf16 has.
    """

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.data = parameter.data.sign() * (parameter.data.abs() > 1)

    def forward(self, x: Tensor, *, with_spare: bool = False) -> Tensor:
        """Compute outputs of shape (samples, width)."""
        if not self.checkpointed:
            return super().forward(x, with_spare=with_spare)
        hidden = checkpoint(self.first, x, use_reentrant=False).relu()
        out: Tensor = checkpoint(self.second, hidden, use_reentrant=False) + self.shift
        return out + checkpoint(self.spare, x, use_reentrant=False) if with_spare else out


def samples_of(ranks: int) -> Tensor:
    """Return a sample for each rank, of shape (ranks, 1, width)."""
    return torch.randint(0, 2, (ranks, 1, WIDTH), generator=torch.Generator().manual_seed(1)).float()


def inputs_of(samples: Tensor, micro_batch: int) -> Tensor:
    """Return the samples of a micro-batch."""
    return samples * (micro_batch + 1)


def _built(mesh: DeviceMesh, device: torch.device, options: Options) -> SmallNet:
    """Return the sharded net, whose parameters are filled before or, on the meta device, after it is sharded."""
    net = SmallNet().to(device)
    net.checkpointed = options["checkpoint"]
    net.first.weight.requires_grad_(not options["frozen"])
    if options["ignored_params"]:
        net.first.bias.data = net.first.bias.data.to(_DTYPES[options["param_dtype"]])
    if options["build"] == "meta":
        net.to("meta")
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if options["offload_policy"] else OffloadPolicy()
    shard = partial(
        fully_shard,
        mesh=mesh,
        reshard_after_forward=options["reshard_after_forward"],
        shard_placement_fn=partial(_placement, placement=options["shard_placement_fn"]),
        offload_policy=offload,
        ignored_params={net.first.bias} if options["ignored_params"] else set(),
    )
    layers: dict[str, list[Any]] = {
        "layers": [net.first, net.second],
        "layers together": [[net.first, net.second]],
        "root alone": [],
    }
    for module in layers[options["groups"]]:
        shard(module, mp_policy=_policy(options, is_root=False))
    shard(net, mp_policy=_policy(options, is_root=True))
    if options["build"] == "meta":
        net.to_empty(device="cpu" if options["offload_policy"] else device)
        _fill(net, SmallNet())
    return net


def _placement(parameter: nn.Parameter, *, placement: str) -> Shard:
    is_row = placement == "rows" or (placement == "columns of matrices" and parameter.ndim == 1)
    return Shard(0 if is_row else parameter.ndim - 1)


def _fill(net: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            value = source.get_parameter(name).to(parameter.device)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


def _set_up(net: SmallNet, options: Options) -> None:
    """Call the methods that apply to all steps, for options without their defaults."""
    root, modules = cast("FSDPModule", net), fsdp_modules(net)
    for module in modules:
        if options["gradient_divide_factor"] != "default":
            module.set_gradient_divide_factor(options["gradient_divide_factor"])
        if options["force_sum_reduction_for_comms"]:
            module.set_force_sum_reduction_for_comms(True)
    if not options["reshard_after_backward"]:
        root.set_reshard_after_backward(False)
    if options["reduce_scatter_unused_params"]:
        root.set_reduce_scatter_unused_params(True)
    if options["reduce_scatter_max_input_buffers"] > 1:
        root.set_reduce_scatter_max_input_buffers(options["reduce_scatter_max_input_buffers"])
    if options["separate_reduce_scatter_group"]:
        with patch.object(dist, "new_group", partial(dist.new_group, timeout=_GROUP_LIMIT)):
            root.set_separate_reduce_scatter_group()
    backward = [modules[0], *reversed(modules[1:])]
    if options["modules_to_prefetch"] == "forward":
        for module, following in itertools.pairwise(modules):
            module.set_modules_to_forward_prefetch([following])
    elif options["modules_to_prefetch"] == "backward":
        for module, following in itertools.pairwise(backward):
            module.set_modules_to_backward_prefetch([following])


def _evaluate(net: SmallNet, own: Tensor, options: Options) -> None:
    with torch.no_grad():
        net(_cast(own, options))


def _cast(inputs: Tensor, options: Options) -> Tensor:
    return inputs if options["cast_forward_inputs"] else inputs.to(_DTYPES[options["param_dtype"]])


def _train(net: SmallNet, samples: Tensor, rank: int, options: Options) -> None:
    """Run the micro-batches of a step."""
    root, modules = cast("FSDPModule", net), fsdp_modules(net)
    if options["no_grad_forward"]:
        _evaluate(net, samples[rank], options)
    for index in range(MICRO_BATCHES):
        is_last = index == MICRO_BATCHES - 1
        if options["gradient_sync"] == "last":
            root.set_requires_gradient_sync(is_last)
        elif options["gradient_sync"] == "all-reduce-last":
            root.set_requires_all_reduce(is_last)
        if options["set_is_last_backward"]:
            root.set_is_last_backward(is_last)
        if options["unshard"] != "no":
            handles = [module.unshard(async_op=options["unshard"] == "asynchronous") for module in modules]
            for handle in filter(None, handles):
                handle.wait()
        inputs = _cast(inputs_of(samples[rank], index), options)
        with_spare = options["reduce_scatter_unused_params"] and rank == 0
        losses = [net(inputs, with_spare=with_spare).sum() for _ in range(options["forwards_per_step"])]
        torch.autograd.backward(losses)


SUSPECTS: tuple[Options, ...] = (
    {"mesh": "N x 1", "reshard_after_forward": 2},
    # findings/columns_resharded_to_two_ranks.py
    {"shard_placement_fn": "columns", "reshard_after_forward": 2},
    {"shard_placement_fn": "columns of matrices", "reshard_after_forward": 2},
    {"mesh": "1 x N", "shard_placement_fn": "columns", "reshard_after_forward": 2},
    {"mesh": "1 x N", "shard_placement_fn": "columns of matrices", "reshard_after_forward": 2},
    {"gradient_divide_factor": 8.0, "force_sum_reduction_for_comms": False, "mesh": "default"},  # gloo cannot multiply
    {"gradient_divide_factor": 8.0, "force_sum_reduction_for_comms": False, "mesh": "1 x N"},
    # findings/divide_factor_of_one_shard.py
    {"mesh": "N x 1", "gradient_divide_factor": 8.0, "force_sum_reduction_for_comms": True},
    # findings/unused_parameters_of_postponed_reduction.py
    {"param_dtype": "bf16", "reduce_dtype": "fp32", "gradient_sync": "last", "reduce_scatter_unused_params": True},
)
"""Options that fail in some version of torch: tried first, since narrowing a row down takes long."""


@experiment(needs=Needs.TRAINING)
def sweep(rank: RankWorld) -> Swept:
    """Train with every three values of different options, except refused ones."""
    return OptionSweep(rank).swept()


class OptionSweep(RowSweep):
    """Rows with every three values of FSDP2's options, on the meshes that the options name."""

    def __init__(self, rank: RankWorld) -> None:
        trials = meshes_of(rank)

        def ended(options: Options) -> Ended:
            return trials[options["mesh"]].ended(partial(differences, rank, options))

        super().__init__(rank, OPTIONS, ended, label="options", strength=3, suspects=SUSPECTS)


def meshes_of(rank: RankWorld) -> dict[str, Trials]:
    """Return trials on the cell's mesh, on replicas of one shard and on shards of one replica, by `mesh` of OPTIONS."""
    size, device = rank.mesh.size(), rank.device.type
    return {
        "default": Trials(fsdp_mesh(rank.mesh)),
        "N x 1": Trials(init_device_mesh(device, (size, 1))),
        "1 x N": Trials(init_device_mesh(device, (1, size))),
    }
