"""Limits of supported torch versions: abilities that not all of them have, and tasks that must not share a process.

A case that needs a missing ability is `unsupported`, before a rank starts. A limit that torch itself announces by an
exception is no fault of the version that has the limit; wrong results are faults, and belong into waivers.yaml.
"""

from collections.abc import Iterator
from importlib.util import find_spec

from conformance.outcomes import Unsupported
from conformance.plan.cells import Cell
from conformance.plan.mesh import Mesh
from conformance.run.experiment import Needs
from conformance.torch_release import Release, release
from reference_trainer.precision import PRECISIONS

_RECOMPILATIONS = 8
"""Default of `torch._dynamo.config.recompile_limit`."""
_QUERIES_OF_A_PAD = 32


def require_features(needs: Needs, cell: Cell, *, device: str, torch_version: str) -> None:
    """Raise Unsupported if an experiment with these needs cannot be done for a cell with this torch.

    `device` is the type of the device on which the ranks compute.
    """
    if cell.implementation == "fsdp1":
        return
    torch = release(torch_version)
    for lacking in (
        *_streams(needs, torch, device),
        *_averages(needs, cell, torch, device),
        *_uneven(needs, cell, torch),
        *_uneven_checkpoints(needs, cell, torch),
        *_recompilation(needs, cell, torch),
        *_compiled_models(needs, cell, torch),
        *_experts_of_ranks(needs, cell, torch),
        *_fused_across_meshes(needs, cell, torch),
        *_rings(needs, cell, device),
        *_float8(needs, cell, torch),
    ):
        raise Unsupported(f"{lacking}; this is torch {torch_version}")


def _streams(needs: Needs, torch: Release, device: str) -> Iterator[str]:
    """Yield the limit of FSDP2 on the CPU of torch 2.6.

    FSDP2 records an event on a stream in its first all-gather, and `torch.cpu.Stream` of 2.6 has no such method:
    https://github.com/pytorch/pytorch/pull/145935 ("Now I can use FSDPv2 on CPU").
    """
    if torch < (2, 7) and device == "cpu" and Needs.FORWARD in needs:
        yield "FSDP2 runs on the CPU from torch 2.7 on, in which torch.cpu.Stream has record_event"


def _averages(needs: Needs, cell: Cell, torch: Release, device: str) -> Iterator[str]:
    """Yield the limit of HSDP on the CPU up to torch 2.7.

    Replicas average their gradients by an all-reduce: "Cannot use ReduceOp.AVG with Gloo", until
    https://github.com/pytorch/pytorch/pull/149781. A simulated world, which averages nothing, ends in an assertion on
    the event of that all-reduce (`post_backward` of torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    """
    if torch < (2, 8) and device == "cpu" and Needs.FORWARD in needs and Mesh.parse(cell.mesh).dp_replicate > 1:
        yield "HSDP runs on the CPU from torch 2.8 on, in which gloo averages in an all-reduce"


def _uneven(needs: Needs, cell: Cell, torch: Release) -> Iterator[str]:
    """Yield the limit of uneven shards over two mesh dimensions up to torch 2.7.

    `fully_shard` of a parameter that tensor parallelism shards by rows needs rows that the ranks of both divide:
    NotImplementedError "FSDP+TP sharding does not support uneven sharding for now", in `_fsdp_param.py`; not since
    https://github.com/pytorch/pytorch/pull/150490.
    """
    mesh = Mesh.parse(cell.mesh)
    if torch >= (2, 8) or mesh.tp == 1 or Needs.SHARDING not in needs:
        return
    model = cell.config.model
    sharded_by_rows = {
        "vocab_size": model.vocab_size,
        "dim": model.dim,
        "ffn_dim": model.ffn_dim,
        "n_kv_heads * head_dim": model.n_kv_heads * model.head_dim,
    }
    for name, rows in sharded_by_rows.items():
        if rows % (mesh.dp_shard * mesh.tp):
            yield (
                f"FSDP2 with tensor parallelism takes uneven shards from torch 2.8 on: {name} is {rows}, which "
                f"dp_shard {mesh.dp_shard} x tp {mesh.tp} does not divide"
            )


def _uneven_checkpoints(needs: Needs, cell: Cell, torch: Release) -> Iterator[str]:
    """Yield the limit of checkpoints of another mesh up to torch 2.9, with tensor-parallel shards that FSDP2 halves.

    The planner of torch.distributed.checkpoint refuses: "mismatch sizes torch.Size([12, 36]) vs torch.Size([13, 36])".
    """
    mesh = Mesh.parse(cell.mesh)
    is_loaded_elsewhere = cell.saved_on not in ("none", "same") and mesh.dp_shard > 1 and mesh.tp > 1
    if torch < (2, 10) and Needs.FORWARD in needs and cell.model == "uneven-tp" and is_loaded_elsewhere:
        yield "a checkpoint of another mesh is loaded into uneven shards of tensor-parallel shards from torch 2.10 on"


def _recompilation(needs: Needs, cell: Cell, torch: Release) -> Iterator[str]:
    """Yield the limit of compiled blocks in a dispatch mode up to torch 2.9.

    A guard fails at each call inside of a mode that lets torch.compile compile (`DispatchTap`), so that the block is
    compiled again; more than `torch._dynamo.config.recompile_limit` times is an error, since the graph must be whole.
    """
    calls = cell.config.model.n_layers * cell.steps * cell.accumulation
    if cell.activation_checkpointing != "none":
        calls *= 2
    if torch < (2, 10) and cell.compile and Needs.FORWARD in needs and calls > _RECOMPILATIONS:
        yield (
            f"compiled blocks are observed from torch 2.10 on if they are called more than {_RECOMPILATIONS} times, "
            f"here {calls} times: before, each call compiles anew"
        )


def _compiled_models(needs: Needs, cell: Cell, torch: Release) -> Iterator[str]:
    """Yield the limit of compiled models up to torch 2.10.

    Graphs then begin before the hooks of FSDP, with the embedding, whose gradient they sum in another order than eager
    mode, which the emulation has. Seen with 2.9; 2.10 was not tried.
    """
    if torch < (2, 11) and cell.compiled == "model" and Needs.FORWARD in needs:
        yield "a compiled model is judged from torch 2.11 on, in which the graphs are those of its blocks"


def _experts_of_ranks(needs: Needs, cell: Cell, torch: Release) -> Iterator[str]:
    """Yield the limit of experts that are divided among ranks up to torch 2.9.

    FSDP2 ignores the factor by which gradients are divided in a group of one shard, until
    https://github.com/pytorch/pytorch/pull/167178.
    """
    if torch < (2, 10) and Needs.SHARDING in needs and Mesh.parse(cell.mesh).ep > 1:
        yield "experts are divided among ranks from torch 2.10 on, which divides gradients of one shard by the factor"


def _fused_across_meshes(needs: Needs, cell: Cell, torch: Release) -> Iterator[str]:
    """Yield the limit of fused optimizers up to torch 2.8.

    A fused step takes all parameters at once, also those that tensor parallelism leaves to FSDP's mesh: "Could not run
    pointwise computation across different mesh".
    """
    mesh = Mesh.parse(cell.mesh)
    has_two_meshes = mesh.tp > 1 and not cell.norms_in_tp
    if torch < (2, 9) and Needs.FORWARD in needs and has_two_meshes and cell.optimizer == "adamw-fused":
        yield "a fused optimizer steps parameters of two meshes from torch 2.9 on"


def _rings(needs: Needs, cell: Cell, device: str) -> Iterator[str]:
    """Yield the limit of ring attention in fp32 on accelerators.

    Their efficient attention, the only fused one in fp32, pads the logarithms of sums of exponentials to multiples of
    32 queries (`kAlignLSE` in aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h), which the
    ring merges with outputs that are not padded: "The size of tensor a (32) must match the size of tensor b (16)".
    """
    cp, tokens = Mesh.parse(cell.mesh).cp, cell.config.data.seq_len
    pads = tokens % (2 * cp * _QUERIES_OF_A_PAD) > 0
    if cp > 1 and Needs.FORWARD in needs and device != "cpu" and cell.precision == "fp32" and pads:
        chunk = tokens // (2 * cp)
        yield f"ring attention in fp32 needs chunks of {_QUERIES_OF_A_PAD} tokens on accelerators, here of {chunk}"


def _float8(needs: Needs, cell: Cell, torch: Release) -> Iterator[str]:
    """Yield the need of float8 training: torchao, and a torch that goes with it.

    torchao 0.18 imports `torch.nn.functional.ScalingType`, which torch has from 2.10 on.
    """
    if cell.float8 == "none" or Needs.SHARDING not in needs:
        return
    if find_spec("torchao") is None:
        yield "float8 training needs torchao, which is not installed: pip install torchao"
    elif torch < (2, 10):
        yield "torchao 0.18 needs torch 2.10"


def kind_of_processes(cell: Cell, *, torch_version: str) -> str:
    """Return the kind of a cell's tasks; only tasks of one kind may share processes.

    DTensor caches sharding decisions with the mesh for which they were made, and uses them for any mesh that compares
    equal. The tp rows of dp4-tp2 and of hsdp2x2-tp2 compare equal, but their process groups have other names ("Could
    not resolve the process group registered under the name 9", torch 2.13). The cache has no public way to be cleared.
    """
    if not confuses_embeddings(torch_version):
        return cell.mesh
    precision = PRECISIONS[cell.precision]
    return f"{cell.mesh} {cell.model} {precision.build or precision.shard}"


def confuses_embeddings(torch_version: str) -> bool:
    """Return whether DTensor may confuse an embedding with an earlier one of the process, as up to torch 2.10.

    With an embedding of another vocabulary: "EmbeddingBackward0 returned an invalid gradient" (fixed by
    https://github.com/pytorch/pytorch/pull/174727). With an embedding sharded in another dtype: "assert
    self.mask_buffer.data is not None" (https://github.com/pytorch/torchchat/issues/1086; the mask's equality is changed
    by https://github.com/pytorch/pytorch/pull/169748). A trainer, which has one model, never sees the fault. torch 2.13
    has both changes; 2.11 and 2.12 were not checked, and are treated as without, which costs only time.
    """
    return release(torch_version) <= (2, 12)
