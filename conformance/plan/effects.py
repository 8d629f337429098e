"""Preconditions for options to have an effect on a cell, each with the message if it fails."""

from collections.abc import Iterator, Mapping
from typing import Any

from conformance.plan.mesh import Mesh
from conformance.plan.workload import MODELS

Precondition = tuple[bool, str]
"""True if it holds, and the message if it does not."""
_MULTIPLE = 16
"""Kernels of float8 products take numbers of rows and columns that are multiples of this."""


def option_effects(axes: Mapping[str, Any], mesh: Mesh) -> Iterator[Precondition]:
    """Yield the preconditions of context parallelism, float8 and compiled models, by the names and values of axes."""
    yield from _context_effects(axes, mesh)
    yield from _float8_effects(axes, mesh)
    yield from _compiled_effects(axes, mesh)


def _context_effects(axes: Mapping[str, Any], mesh: Mesh) -> Iterator[Precondition]:
    """Yield the preconditions of ranks that share samples, on a cell with these values of its axes."""
    if mesh.cp == 1:
        return
    yield mesh.pp == 1, "contexts of ring attention are not opened in the stages of a pipeline"
    yield MODELS[axes["model"]].arithmetic == "float", "the integer model has an attention of its own"
    yield not MODELS[axes["model"]].n_experts, "experts have no context parallelism"
    yield axes["passes"] == 1, "a backward of several passes would be outside of the contexts of all but the last"
    yield not axes["compile"], "the attention that torch replaces is no graph that can be compiled"
    yield axes["implementation"] == "fsdp2", "FSDP1 is there for comparison, without context parallelism"
    yield not axes["dropout"], "masks of dropout are joined by samples, and not by parts of sequences"


def _float8_effects(axes: Mapping[str, Any], mesh: Mesh) -> Iterator[Precondition]:
    """Yield the preconditions of products in float8, and of weights that are gathered in it."""
    if axes["float8"] == "none":
        return
    model = MODELS[axes["model"]]
    yield model.dim % _MULTIPLE == 0, f"kernels of float8 products take no matrix of model {axes['model']}"
    yield model.arithmetic == "float", "whole numbers beyond 16 are no float8 numbers"
    yield mesh.tp == 1 and not model.n_experts, "the trainer multiplies in float8 without tp and experts"
    yield axes["implementation"] == "fsdp2", "FSDP1 is there for comparison, without float8"
    if axes["float8"] == "tensorwise":
        sizes = (model.dim, model.ffn_dim, model.n_kv_heads * model.head_dim)
        even = all(size % mesh.dp_shard == 0 for size in sizes if size % _MULTIPLE == 0)
        yield even, "shards that are gathered in float8 are not padded"
        yield axes["reshard"] != "k2", "torch cannot gather float8 shards that are resharded"
        yield axes["offload"] == "none", "a copy of a weight on another device has lost its scale"


def _compiled_effects(axes: Mapping[str, Any], mesh: Mesh) -> Iterator[Precondition]:
    """Yield the preconditions of a compiled model."""
    if axes["compiled"] == "blocks":
        return
    yield axes["compile"], "compiled model needs compile true"
    yield mesh.tp == 1 and mesh.pp == 1, "a compiled model has neither tensor parallelism nor pipelines"
    yield axes["implementation"] == "fsdp2", "FSDP1 is there for comparison, and its blocks alone are compiled"
    # What AOTAutograd makes of it saves the state of generators by an operator of higher order.
    yield axes["activation_checkpointing"] == "none", "instruments do not see recomputation in a compiled model"
