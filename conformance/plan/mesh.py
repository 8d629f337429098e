"""Names of device meshes, such as `hsdp2x2-tp2`."""

import re
from typing import Self

import msgspec

from reference_trainer.checks import UsageError

_NUMBER = "([1-9][0-9]{0,3})"
_MESH = re.compile(
    f"(?=.)(?:pp{_NUMBER})?(?:(?:^|-)(?:dp{_NUMBER}|hsdp{_NUMBER}x{_NUMBER}))?(?:(?:^|-)tp{_NUMBER})?(?:-ep{_NUMBER})?"
    f"(?:-cp{_NUMBER})?"
)
_MESH_HELP = (
    "write dp2, tp4, dp2-tp2, hsdp2x2 (replicate x shard), hsdp2x2-tp2, pp2-dp2, dp4-ep2, dp4-cp2 or dp1, with numbers "
    "from 1 to 4096"
)


class AxisError(UsageError):
    """An axis that does not exist, or a value that it does not have."""


class Mesh(msgspec.Struct, frozen=True):
    """A device mesh: stages of a pipeline, each with replicas of shards of tensor-parallel groups."""

    dp_replicate: int = 1
    """Number of replicas of the sharded model (HSDP)."""
    dp_shard: int = 1
    """Number of ranks that the parameters are sharded over."""
    tp: int = 1
    """Number of tensor-parallel ranks."""
    pp: int = 1
    """Number of ranks over which the layers are cut into stages."""
    ep: int = 1
    """Number of ranks among those of `dp_shard` over which experts are divided."""
    cp: int = 1
    """Number of ranks among those of `dp_shard` that share samples, each with a part of every sequence."""

    def __post_init__(self) -> None:
        for name, size in msgspec.structs.asdict(self).items():
            if type(size) is not int or not 1 <= size <= 4096:
                raise AxisError(f"mesh dimension `{name}` = {size!r}: give an int from 1 to 4096")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the mesh of a canonical name such as `hsdp2x2-tp2`; raises AxisError for any other text."""
        match = _MESH.fullmatch(text)
        if match is None:
            raise AxisError(f"axis `mesh` = {text!r}: not a mesh; {_MESH_HELP}")
        pp, shard, replicate, hybrid_shard, tp, ep, cp = (int(group or 1) for group in match.groups())
        if max(pp, shard, replicate, hybrid_shard, tp, ep, cp) > 4096:
            raise AxisError(f"axis `mesh` = {text!r}: too large; {_MESH_HELP}")
        mesh = cls(dp_replicate=replicate, dp_shard=shard * hybrid_shard, tp=tp, pp=pp, ep=ep, cp=cp)
        if mesh.dp_shard % ep:
            raise AxisError(f"axis `mesh` = {text!r}: ep{ep} does not divide {mesh.dp_shard} ranks of dp_shard")
        if mesh.dp_shard % cp:
            raise AxisError(f"axis `mesh` = {text!r}: cp{cp} does not divide {mesh.dp_shard} ranks of dp_shard")
        if mesh.name != text:
            raise AxisError(f"axis `mesh` = {text!r}: not the canonical name of this mesh; write {mesh.name!r}")
        return mesh

    @property
    def name(self) -> str:
        """Canonical name of this mesh."""
        if self.dp_replicate > 1:
            data = f"hsdp{self.dp_replicate}x{self.dp_shard}"
        else:
            data = f"dp{self.dp_shard}" if self.dp_shard > 1 else ""
        tensor = f"tp{self.tp}" if self.tp > 1 else ""
        pipeline = f"pp{self.pp}" if self.pp > 1 else ""
        experts = f"ep{self.ep}" if self.ep > 1 else ""
        context = f"cp{self.cp}" if self.cp > 1 else ""
        return "-".join(filter(None, (pipeline, data, tensor, experts, context))) or "dp1"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp
