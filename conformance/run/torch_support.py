"""What a run needs of torch that not every supported version has: the one place for it.

A case that asks for such a run is `unsupported`, before a rank starts. What a task needs goes by its name: one that
only probes needs nothing of FSDP2, one that only builds needs no forward. A limit that torch itself announces, by an
exception, is no fault of the version that has it; wrong results are, and belong into waivers.yaml.
"""

from collections.abc import Iterator

from conformance.judge.skips import Unsupported
from conformance.judge.support import release
from conformance.plan.cells import Cell, Mesh

_WITHOUT_FSDP = ("build:probe", "memory:without_fsdp", "device_memory:surroundings")
_BUILDS_ONLY = "build:"


def require_features(task: str, cell: Cell, *, device: str, torch_version: str) -> None:
    """Raises Unsupported if a task, such as `training:train_cell`, cannot be done for this cell with this torch."""
    if task in _WITHOUT_FSDP or cell.implementation == "fsdp1":
        return
    torch = release(torch_version)
    for lacking in (*_streams(task, torch, device), *_averages(task, cell, torch, device), *_uneven_parts(cell, torch)):
        raise Unsupported(f"{lacking}; this is torch {torch_version}")


def _streams(task: str, torch: tuple[int, ...], device: str) -> Iterator[str]:
    """FSDP2 records an event on a stream in its first all-gather, and `torch.cpu.Stream` of 2.6 has no such method:
    https://github.com/pytorch/pytorch/pull/145935 ("Now I can use FSDPv2 on CPU")."""
    if torch < (2, 7) and device == "cpu" and not task.startswith(_BUILDS_ONLY):
        yield "FSDP2 runs on the CPU from torch 2.7 on, in which torch.cpu.Stream has record_event"


def _averages(task: str, cell: Cell, torch: tuple[int, ...], device: str) -> Iterator[str]:
    """Replicas average their gradients by an all-reduce: "Cannot use ReduceOp.AVG with Gloo", until
    https://github.com/pytorch/pytorch/pull/149781. A simulated world communicates nothing."""
    real = not task.startswith(_BUILDS_ONLY) and not task.endswith("_in_simulation")
    if torch < (2, 8) and device == "cpu" and real and Mesh.parse(cell.mesh).dp_replicate > 1:
        yield "HSDP runs on the CPU from torch 2.8 on, in which gloo averages in an all-reduce"


def _uneven_parts(cell: Cell, torch: tuple[int, ...]) -> Iterator[str]:
    """`fully_shard` of a parameter that tensor parallelism splits by rows needs rows that the ranks of both divide.

    NotImplementedError "FSDP+TP sharding does not support uneven sharding for now", in `_fsdp_param.py`; not since
    https://github.com/pytorch/pytorch/pull/150490.
    """
    if torch >= (2, 8):
        return
    from conformance.plan.workload import trainer_config  # imports torch
    from reference_trainer.parallel_dims import resolve_mesh

    config = trainer_config(cell)
    dims, model = resolve_mesh(config.mesh, world_size=cell.world_size), config.model
    if dims.tp == 1:
        return
    split_by_rows = {
        "vocab_size": model.vocab_size,
        "dim": model.dim,
        "ffn_dim": model.ffn_dim,
        "n_kv_heads * head_dim": model.n_kv_heads * model.head_dim,
    }
    parts = dims.dp_shard * dims.tp
    for name, rows in split_by_rows.items():
        if rows % parts:
            yield (
                f"FSDP2 with tensor parallelism takes uneven parts from torch 2.8 on: {name} is {rows}, which "
                f"dp_shard {dims.dp_shard} x tp {dims.tp} does not divide"
            )
