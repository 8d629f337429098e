"""Private state of FSDP2's modules, for facts without a public attribute: offloading, prefetching, precision.

An error says so if a torch keeps the state elsewhere. Where the CPU is also the device of computation, offloading moves
nothing: only FSDP's own state shows the policy. A list of one group to prefetch has no other visible effect: FSDP
prefetches that group by default.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


@contextmanager
def private_state(content: str) -> Iterator[None]:
    """Read private attributes of FSDP2 in the context.

    Raises RuntimeError, with the version of torch, instead of AttributeError: this module must be adapted to read the
    content.
    """
    try:
        yield
    except AttributeError as error:
        raise RuntimeError(f"torch {torch.__version__}: {error}; adapt {__name__}, which reads {content}") from None


def offloading_of(model: nn.Module) -> dict[str, str]:
    """Return `none`, `cpu` or `cpu pinned` for each parameter that FSDP2 manages, by its name in the model.

    `?` stands for the name of a parameter that does not belong to the model. Raises RuntimeError for a version of torch
    whose FSDP keeps the policy elsewhere.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    policies: dict[str, str] = {}
    with private_state("what FSDP offloads"):
        for module in model.modules():
            for managed in _managed(module) if isinstance(module, FSDPModule) else ():
                policies[names.get(id(managed.sharded_param), "?")] = _policy(managed)
    return policies


def gradient_divisors_of(model: nn.Module) -> dict[str, float | None]:
    """Return the number by which each FSDP module divides gradients, by its name; None: that of the ranks.

    Raises RuntimeError for a version of torch whose FSDP keeps it elsewhere.
    """
    divisors: dict[str, float | None] = {}
    with private_state("by what FSDP divides gradients"):
        for name, module in model.named_modules():
            for group in _groups(module) if isinstance(module, FSDPModule) else ():
                divisors[name] = _divisor(group)
    return divisors


def _divisor(group: Any) -> float | None:
    """Return the divisor of a group. Up to torch 2.7 an operator holds it, and it cannot be read unless it is unset."""
    if getattr(group, "reduce_scatter_reduce_op", group) is None:
        return None
    divisor: float | None = group.gradient_divide_factor
    return divisor


def managed_parameters(model: nn.Module) -> frozenset[int]:
    """Return Python's ids of the sharded parameters that FSDP2 manages.

    One that was put in the place of another since the model was sharded counts, too: FSDP2 takes it over before the
    first forward pass. Raises RuntimeError for a version of torch whose FSDP keeps them elsewhere.
    """
    with private_state("the parameters of its groups"):
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        return frozenset(id(each) for module in sharded for managed in _managed(module) for each in _sharded(managed))


def _sharded(managed: Any) -> list[Any]:
    """Return the parameter that FSDP2 has sharded, and the one that is in its place now."""
    place = managed._module_info
    return [managed.sharded_param, getattr(place.module, place.param_name)]


def _managed(module: FSDPModule) -> list[Any]:
    return [managed for group in _groups(module) for managed in group.fsdp_params]


def _groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # several since torch 2.12
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _policy(managed: Any) -> str:
    offloaded = "cpu pinned" if managed.pin_memory else "cpu"
    return offloaded if managed.offload_to_cpu else "none"


def backward_prefetch_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the modules that each FSDP module is configured to prefetch, in order.

    The first of its modules stands for a group of several; modules without a list are left out. Raises RuntimeError for
    a version of torch whose FSDP keeps the lists elsewhere.
    """
    names: dict[Any, str] = {}
    with private_state("what FSDP was told to prefetch"):
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                names.setdefault(module._get_fsdp_state(), name)
        prefetched = {name: [names[to] for to in state._states_to_backward_prefetch] for state, name in names.items()}
    return {name: modules for name, modules in prefetched.items() if modules}


ROOT = "of the root"
"""Name of the group of parameters that belong to the root alone, which has no path."""


def group_modules(owner: object) -> str:
    """Return the paths of a group's modules, joined by commas, if an object is a group of FSDP2; else nothing.

    The group of the root alone is called `ROOT`. Before the first forward groups have no paths.
    """
    if type(owner).__name__ != "FSDPParamGroup":
        return ""
    paths: str | None = getattr(owner, "_module_fqn", None)
    return "" if paths is None else paths or ROOT


def parameters_of_group(owner: object) -> frozenset[int]:
    """Return Python's ids of a group's sharded parameters if an object is a group of FSDP2; else nothing.

    Raises RuntimeError for a version of torch whose FSDP keeps them elsewhere.
    """
    if type(owner).__name__ != "FSDPParamGroup":
        return frozenset()
    with private_state("the parameters of its groups"):
        return frozenset(id(managed.sharded_param) for managed in owner.fsdp_params)  # type: ignore[attr-defined]


def unsharded_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of FSDP2's unsharded parameters that wait for a later micro-batch, by name of the parameter.

    `?` stands for the name of a parameter that is unsharded at present.
    Raises RuntimeError for a version of torch whose FSDP keeps them elsewhere.
    """
    with private_state("which gradients wait for a later micro-batch"):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            for managed in _managed(module) if isinstance(module, FSDPModule) else ():
                name = names.get(id(managed.sharded_param), "?")
                unsharded = getattr(managed, "_unsharded_param", None)
                for gradient in (managed.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
                    if gradient is not None:
                        yield name, gradient


def partial_sums(model: nn.Module) -> Iterator[Tensor]:
    """Yield the gradients of groups that are summed over shards and wait for the all-reduce over replicas.

    Raises RuntimeError for a version of torch whose FSDP keeps them elsewhere.
    """
    with private_state("which gradients wait for replicas"):
        for module in model.modules():
            for group in _groups(module) if isinstance(module, FSDPModule) else ():
                if group._partial_reduce_output is not None:
                    yield group._partial_reduce_output


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one group of parameters that FSDP2 gathers together, and the bytes of its buffers on this rank."""

    modules: list[str]
    """Paths of the group's modules; that of the root is empty."""
    names: list[str]
    """Names of the group's parameters."""
    shard_bytes: int
    """Bytes of the shards, padded, in the dtype of the masters."""
    unsharded_bytes: int
    """Bytes of the unsharded parameters, padded, in the dtype of computation."""
    trained_shard_bytes: int
    """Bytes of the shards of parameters that are trained."""
    computed_bytes: int
    """Bytes of the unsharded gradients, padded, in the dtype of computation."""
    reduced_bytes: int
    """Bytes of the unsharded gradients, padded, in the dtype of reduction."""
    ranks: int
    """Ranks that shard the group."""
    kept_bytes: int
    """Bytes of unsharded parameters that the group may keep between forward and backward: all, none, or a smaller
    shard."""
    prefetched: int
    """Most groups that the group was told to gather ahead, in forward or in backward."""


_STATE = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
_GROUP = ("fsdp_params", "modules", "mesh_info", "post_forward_mesh_info")
_MANAGED = ("sharded_param", "orig_dtype", "param_dtype", "reduce_dtype", "padded_sharded_param_size")
_MESH = ("shard_mesh_dim", "mesh")


def require_settings(state: Any, group: Any) -> None:
    """Raise RuntimeError, with all attributes that are missing, for a state or a group of FSDP2 that keeps no settings.

    A default in place of an attribute that another torch has renamed would make a bound of memory wrong.
    """
    kept = [(state, _STATE), (group, _GROUP)]
    kept += [(managed, _MANAGED) for managed in getattr(group, "fsdp_params", ())]
    kept += [(mesh, _MESH) for name in _GROUP if name.endswith("mesh_info") and (mesh := getattr(group, name, None))]
    missing = {f"{type(each).__name__}.{name}" for each, names in kept for name in names if not hasattr(each, name)}
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__}: FSDP2 has no {', '.join(sorted(missing))}; adapt {__name__}, "
            "which reads the settings of its groups"
        )


def settings_of(model: nn.Module, names: Mapping[int, str]) -> list[GroupSettings]:
    """Return the settings of all groups that FSDP2 has made; those of the root are final after the first forward pass.

    `names` has the names of sharded parameters by their Python ids: unsharded ones may be in their place.
    Raises RuntimeError for a version of torch whose FSDP keeps them elsewhere, see `require_settings`.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: dict[int, GroupSettings] = {}
    with private_state("the settings of its groups"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in _groups(module):
                    found.setdefault(id(group), _settings(group, module, names, paths))
    return list(found.values())


def _settings(group: Any, module: FSDPModule, names: Mapping[int, str], paths: Mapping[int, str]) -> GroupSettings:
    state = module._get_fsdp_state()
    require_settings(state, group)
    lists = (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
    ranks = _shard_ranks(group.mesh_info)
    unsharded_bytes = sum(_padded(p) * ranks * _computed_in(p).itemsize for p in group.fsdp_params)
    after = group.post_forward_mesh_info
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    return GroupSettings(
        modules=[paths.get(id(each), "?") for each in group.modules],
        names=[names.get(id(p.sharded_param), "?") for p in group.fsdp_params],
        shard_bytes=sum(_padded(p) * p.orig_dtype.itemsize for p in group.fsdp_params),
        unsharded_bytes=unsharded_bytes,
        trained_shard_bytes=sum(_padded(p) * p.orig_dtype.itemsize for p in trained),
        computed_bytes=sum(_padded(p) * ranks * _computed_in(p).itemsize for p in trained),
        reduced_bytes=sum(_padded(p) * ranks * (p.reduce_dtype or _computed_in(p)).itemsize for p in trained),
        ranks=ranks,
        kept_bytes=_kept_bytes(unsharded_bytes, ranks, 1 if after is None else _shard_ranks(after)),
        prefetched=max(map(len, lists)),
    )


def keeps_its_dtype(module: FSDPModule) -> bool:
    """Return whether FSDP2 was given a policy of mixed precision for a module that leaves its parameters in fp32.

    That is a policy other than that of a call that names none. Raises RuntimeError for a version of torch whose FSDP
    keeps policies elsewhere.
    """
    with private_state("the policy of mixed precision"):
        policies = [group.mp_policy for group in _groups(module)]
    kept = (None, torch.float32)
    return bool(policies) and all(each.param_dtype in kept and each != MixedPrecisionPolicy() for each in policies)


def _kept_bytes(unsharded_bytes: int, ranks: int, ranks_after_forward: int) -> int:
    return 0 if ranks_after_forward == ranks > 1 else unsharded_bytes // ranks_after_forward


def _padded(managed: Any) -> int:
    return int(managed.padded_sharded_param_size.numel())


def _computed_in(managed: Any) -> torch.dtype:
    dtype: torch.dtype = managed.param_dtype or managed.orig_dtype
    return dtype


def _shard_ranks(mesh: Any) -> int:
    """Return the ranks that shard a group, 1 for a mesh that only replicates."""
    return 1 if mesh.shard_mesh_dim is None else int(mesh.shard_mesh_size)
