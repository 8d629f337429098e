"""Policies of FSDP2: casts of mixed precision, and mistakes of users who offload to the CPU."""

from collections.abc import Callable
from itertools import product

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grad_norm_

from conformance.experiments.context import RankWorld, experiment, start_process_group
from conformance.experiments.fsdp_net import Wrong
from conformance.instruments.sharding import full
from conformance.run.experiment import Needs
from conformance.sim import device as simulated
from reference_trainer.mesh import fsdp_mesh
from reference_trainer.mixed_precision import mixed_precision_policy
from reference_trainer.model import Transformer
from reference_trainer.parallelize import parallelize
from reference_trainer.reshard import reshard_policy

_SAMPLES, _WIDTH = 4, 8


class Casts(msgspec.Struct):
    """Inputs, outputs and gradients of a module on one rank, by name."""

    dtypes: dict[str, str]
    """Dtypes."""
    wrong: Wrong
    """Number of elements that differ from those of a plain module whose inputs and parameters were cast."""


@experiment(needs=Needs.TRAINING)
def cast_inputs_and_outputs(rank: RankWorld) -> dict[str, Casts]:
    """Collect inputs, outputs and gradients of a module with `param_dtype` bf16, by policy.

    The name of a policy is `CAST/OUTPUT`: whether inputs are cast, and the output's dtype (`None`: as computed).
    Without a cast the module's argument has the dtype that its layer needs; all other tensors are fp32. Where the
    configuration computes in fp16, that takes the place of bf16.
    """
    outcomes = {}
    low = mixed_precision_policy(rank.config.precision).param_dtype
    low = low if low == torch.float16 else torch.bfloat16
    for casts, output in product((True, False), (None, torch.float32, low)):
        policy = MixedPrecisionPolicy(low, torch.float32, output, cast_forward_inputs=casts)
        net = _Casting().to(rank.device)
        fully_shard(net, mesh=fsdp_mesh(rank.mesh), mp_policy=policy)
        measured = _values(net, rank.device, low, given=torch.float32 if casts else low)
        plain = _Casting().to(rank.device, low)
        expected = _values(plain, rank.device, low, given=low, others=low if casts else torch.float32)
        outcomes[f"{casts}/{_name(output)}"] = Casts(
            dtypes={name: _name(tensor.dtype) for name, tensor in measured.items()},
            wrong={n: int((t.detach() != expected[n].detach().to(t.dtype)).sum()) for n, t in measured.items()},
        )
    return outcomes


class _Casting(nn.Module):
    """Module that keeps its inputs, direct and nested, and returns some of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor, *, table: Tensor, others: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self.seen = {"argument": x, "keyword": table, "inside": others["float"], "integer": others["integer"]}
        return self.layer(x), {"table": table, "integer": others["integer"]}


def _values(
    net: _Casting, device: torch.device, low: torch.dtype, *, given: torch.dtype, others: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_SAMPLES, _WIDTH, generator=generator).to(device, given).requires_grad_()
    floating, integer = (_rounded_by(low, device).to(others), torch.tensor([257, -(2**40) - 1], device=device))
    out, rest = net(x, table=floating, others={"float": floating, "integer": integer})
    out.sum().backward()
    grad, weight = x.grad, net.layer.weight.grad
    assert grad is not None
    assert weight is not None
    returned = {"output": out, "output inside": rest["table"], "output integer": rest["integer"]}
    return net.seen | returned | {"gradient of argument": grad, "gradient of weight": full(weight)}


def _rounded_by(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fp32 numbers that a dtype rounds: ties to even, down and up; away from zero; up to a power of two.

    The last ones are one that neither dtype has in its binary fraction, one that is lost or subnormal, and one that
    becomes infinite.
    """
    half = torch.finfo(dtype).eps / 2
    more = 2.0**-20
    near_one = (1 + half, 1 + 3 * half, 1 + half + more, -1 - half - more, 2 - half)
    return torch.tensor([*near_one, 1 / 3, 1e-40, 3.4e38], device=device)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


_ONLY_FOR_DEVICES = {
    "cpu": ("cuda:gloo", "meta"),
    "sim": (f"sim:{simulated.BACKEND}", "sim"),
    "cuda": ("cuda:nccl", "cuda"),
}
"""Backend that serves no CPU tensors, and a device on which offloaded parameters must not be, by type of device."""


class OffloadErrors(msgspec.Struct):
    """Types and messages of the errors that mistakes raise."""

    trainer: str
    """Error of a trainer that is built on a process group without a backend for CPU tensors."""
    clip: str
    """Error of torch's `clip_grad_norm_` for gradients in host memory, without a backend for CPU tensors."""
    to_empty: str
    """Error of FSDP's forward for parameters on the wrong device."""


@experiment(needs=Needs.TRAINING, process_group=False)
def offload_with_mistakes(rank: RankWorld) -> OffloadErrors:
    """Make each mistake and collect the error.

    On the CPU, gloo stands in for NCCL, registered for CUDA tensors only, and the wrong device is `meta`.
    """
    backend, device = _ONLY_FOR_DEVICES[rank.device.type]
    start_process_group(rank.context, backend=backend)
    return OffloadErrors(
        trainer=_error_of(rank.trainer),
        clip=_error_of(_clip_on_cpu),
        to_empty=_error_of(lambda: _forward_on(device, rank)),
    )


def _clip_on_cpu() -> None:
    # A name that no other mesh has: DTensor's cache would return an equal mesh, with another process group.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("without_cpu_backend",))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    clip_grad_norm_([parameter], 1.0)


def _forward_on(device: str, rank: RankWorld) -> None:
    with torch.device("meta"):
        model = Transformer(rank.config.model)
    parallelize(model, rank.mesh, rank.config, reshard_policy(rank.config, rank.dims, rank.device))
    model.to_empty(device=device)
    model(torch.zeros(1, 1, dtype=torch.int64, device=device))


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
