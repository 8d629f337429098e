"""Log of all collectives as the dispatcher sees them, of FSDP2, DTensor, clipping and the trainer."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from conformance.instruments.dispatch_tap import Handler
from conformance.instruments.facts import UNKNOWN, Collective
from conformance.instruments.issuers import is_of_fsdp, issuing_parameters
from reference_trainer.observer import Observer, Phase

# Names of operators differ between torch versions and between the imperative (c10d) and the functional collectives.
_KIND_BY_SUBSTRING = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "scatter": "scatter",
    "gather": "gather",
    "barrier": "barrier",
    "reduce_": "reduce",
}
_REDUCE_OPS = {
    int(value): name  # type: ignore[call-overload]
    for name, value in dist.ReduceOp.RedOpType.__members__.items()
}
NAMESPACES = ("c10d", "_c10d_functional")
"""Namespaces of the operators that communicate."""
TRANSFERS = {"c10d::send": ("send", "dst"), "c10d::recv_": ("recv", "src")}
"""Direction of a transfer, and the argument that names the other rank within the process group, by operator."""
_NOT_COLLECTIVES = ("wait_tensor", "wrap_tensor", "send", "recv", "p2p", "check_for_nan", "monitored_barrier")


class CollectiveLog(Observer):
    """Listener of the dispatch tap that writes down collectives with the phase of training in which they are issued."""

    def __init__(self, noted: Callable[[Collective], None] | None = None) -> None:
        """`noted`, if given, is called with each collective when this rank has issued it, before it is complete."""
        self._noted = noted
        self.parameters: set[int] | None = None
        """Python's ids of the sharded parameters of the run's model, when `facts` are asked for; None if there is no
        other model that FSDP may have sharded."""
        self._issuing: dict[int, frozenset[int]] = {}
        """Python's ids of the parameters of the group for which FSDP issued a collective, by its number."""
        self._entries: list[tuple[tuple[int, ...], Collective]] = []
        self._step = -1
        self._phase: Phase = "build"
        self._during = ""

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember the phase for the collectives that follow."""
        self._step, self._phase, self._during = step, name, ""

    def rename_phase(self, phase: Phase, *, since: int) -> None:
        """Give another phase to all collectives after the first `since` of them."""
        self._entries[since:] = [
            (ranks, msgspec.structs.replace(entry, phase=phase)) for ranks, entry in self._entries[since:]
        ]

    def sharded(self, model: nn.Module) -> None:
        """Hook the forward of each module sharded by FSDP2, except the root."""
        for name in [name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]:
            # Before FSDP's own hook, in which it gathers.
            model.get_submodule(name).register_forward_pre_hook(partial(self._enter, name), prepend=True)

    def count(self) -> int:
        """Return the number of collectives so far."""
        return len(self._entries)

    def facts(self, mesh: DeviceMesh | None) -> list[Collective]:
        """Return all collectives in the order in which this rank issued them; the mesh, if any, names their groups."""
        names = _group_names(mesh) if mesh is not None else {}
        names.setdefault(tuple(range(dist.get_world_size())), "world")
        others = self._for_other_models()
        return [
            msgspec.structs.replace(
                entry,
                group=names.get(ranks) or _subgroup_name(ranks, names) or entry.group,
                is_of_fsdp=entry.is_of_fsdp and number not in others,
                is_of_other_model=number in others,
            )
            for number, (ranks, entry) in enumerate(self._entries)
        ]

    def listen(self, func: Any) -> Handler | None:
        """Return the handler that writes down the calls of a collective; to be a listener of a `DispatchTap`."""
        if func.namespace not in NAMESPACES:
            return None
        kind = collective_kind(func._schema.name)
        if kind is None:
            return None
        return partial(self._add, kind, [argument.name for argument in func._schema.arguments])

    def _add(self, kind: str, names: Sequence[str], args: Sequence[Any]) -> None:
        arguments = dict(zip(names, args, strict=False))
        tensors = input_tensors(arguments)
        ranks = tuple(sorted(dist.get_process_group_ranks(process_group(arguments))))
        frame = sys._getframe(1)
        by_fsdp = is_of_fsdp(frame)
        if by_fsdp and self.parameters is not None:
            self._issuing[self.count()] = issuing_parameters(frame)
        entry = Collective(
            step=self._step,
            phase=self._phase,
            kind=kind,
            group="ranks " + ",".join(map(str, ranks)),
            numel=sum(t.numel() for t in tensors),
            nbytes=sum(t.nbytes for t in tensors),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "none",
            reduce_op=reduce_op_name(arguments),
            during=self._during,
            is_of_fsdp=by_fsdp,
        )
        self._entries.append((ranks, entry))
        if self._noted:
            self._noted(entry)

    def _for_other_models(self) -> set[int]:
        """Return the numbers of the collectives that FSDP has issued for another model than that of the run."""
        own = self.parameters or set()
        return {number for number, issuing in self._issuing.items() if issuing and not issuing & own}

    def _enter(self, name: str, *_unused: Any) -> None:
        if self._phase in ("evaluate", "forward"):  # in backward modules are entered to be computed again
            self._during = name


def _group_names(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """Return the mesh dimension by its ranks, of the groups to which this rank belongs."""
    names = mesh.mesh_dim_names or ()
    return {tuple(sorted(dist.get_process_group_ranks(mesh.get_group(name)))): name for name in names}


def _subgroup_name(ranks: tuple[int, ...], names: Mapping[tuple[int, ...], str]) -> str | None:
    """Name a group such as `dp_shard/2`, two of the ranks of `dp_shard`."""
    dimension = next((name for group, name in names.items() if name != "world" and set(ranks) < set(group)), None)
    return f"{dimension}/{len(ranks)}" if dimension else None


def collective_kind(operator_name: str) -> str | None:
    """Return the kind of collective that an operator of c10d performs, None for point-to-point, waiting and checks.

    Raises RuntimeError for an operator that a new torch has added: a log that overlooks a collective proves nothing.
    """
    name = operator_name.partition("::")[2]
    if any(other in name for other in _NOT_COLLECTIVES):
        return None
    for substring, kind in _KIND_BY_SUBSTRING.items():
        if substring in name:
            return kind
    raise RuntimeError(f"unknown collective {operator_name}: add it to {__name__}")


def process_group(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    """Return the group of a call: an object, boxed for TorchScript, or a name in functional collectives."""
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, dist.ProcessGroup):
        return group
    if not isinstance(group, str):
        return dist.ProcessGroup.unbox(group)
    resolve = getattr(dist.distributed_c10d, "_resolve_process_group", None)
    if resolve is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no distributed_c10d._resolve_process_group to name groups with"
        )
    return resolve(group)  # type: ignore[no-any-return]


def input_tensors(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Tensors that this rank contributes: inputs where the operator names them, else the tensors reduced in place."""
    for name in ("input_tensor", "input_tensors", "inputs", "input", "self", "tensors", "tensor"):
        value = arguments.get(name)
        if isinstance(value, Tensor):
            return [value]
        if isinstance(value, list | tuple):
            flat = [t for item in value for t in (item if isinstance(item, list | tuple) else [item])]
            return [t for t in flat if isinstance(t, Tensor)]
    return []


def reduce_op_name(arguments: Mapping[str, Any]) -> str | None:
    """Return the name of a collective's reduction, None for a collective without one.

    Functional collectives name it; the imperative ones carry a TorchScript object with its number. Up to torch 2.8 that
    object has no method to tell the number: `UNKNOWN`.
    """
    op = arguments.get("reduce_op")
    if op is None or isinstance(op, str):
        return op.upper() if op else None
    number = getattr(op, "op", None)
    return _REDUCE_OPS[int(number())] if number else UNKNOWN
