"""Faults of torch.distributed.checkpoint: of planners, writers, readers, stagers, and options of state dicts."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.defects.injection import Call, defect, instead_of
from conformance.instruments.sharding import local

_CHECKPOINT = "torch.distributed.checkpoint"
_TWO = "id = dp2-fp32-default-meta"


@defect(
    "CKPT-6",
    "id = dp2-fp32-default-meta-integer",
    "pytorch/pytorch/issues/161368",
    subjects=("rows on 2 ranks",),
    since="2.13",
)
@instead_of(f"{_CHECKPOINT}.filesystem", "narrow_tensor_by_index")
def shards_read_from_their_start(benign: bool, original: Call, tensor: Tensor, offsets: Any, sizes: Any) -> Any:
    """A rank that needs a later piece of a saved shard gets the first one."""
    return original(tensor, offsets if benign else [0] * len(offsets), sizes)


@defect("CKPT-7", _TWO, "pytorch/pytorch/pull/148577", subjects=("enable_plan_caching=True",), since="2.13")
@instead_of(f"{_CHECKPOINT}.default_planner", "_compare_save_plans")
def cached_plan_is_stale(benign: bool, original: Call, plan: Any, other: Any) -> bool:
    """A cached plan is used again as long as its tensors are there, although one has grown and one was added."""
    if benign:
        return bool(original(plan, other))
    return {item.index.fqn for item in plan.items} >= {item.index.fqn for item in other.items}


@defect("CKPT-7", _TWO, "pytorch/pytorch/pull/123869", subjects=("allow_partial_load=True",), since="2.13")
@instead_of(f"{_CHECKPOINT}.default_planner", "create_default_local_load_plan")
def partial_load_clears_the_rest(
    benign: bool, original: Call, state: dict[str, Any], metadata: Any, strict: bool = True
) -> Any:
    """A partial load sets the tensors to zero that the checkpoint lacks."""
    for name in state.keys() - metadata.state_dict_metadata.keys():
        if isinstance(state[name], Tensor):
            local(state[name]).mul_(1 if benign else 0)
    return original(state, metadata, strict)


@defect(
    "CKPT-7",
    _TWO,
    "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html#torch.distributed.checkpoint.FileSystemWriter",
    subjects=("single_file_per_rank=False, _extensions=1",),
    since="2.13",
)
@instead_of(f"{_CHECKPOINT}.filesystem:_StorageWriterTransforms", "transform_save_stream")
def extension_of_first_file_alone(benign: bool, original: Call, transforms: Any, item: Any, stream: Any) -> Any:
    """Only the first file of a rank is transformed by an extension, and all are read as if they were."""
    is_first = Path(stream.name).name.split("_")[3].startswith("0")
    transformed, descriptors = original(transforms, item, stream)
    return (transformed, descriptors) if benign or is_first else (_Unclosed(stream), descriptors)


class _Unclosed:
    """Stream that is left open, as torch leaves it for the next item of the file."""

    def __init__(self, stream: Any) -> None:
        self.write = stream.write

    def flush(self) -> None:
        """Leave everything as it is."""

    def close(self) -> None:
        """Leave everything as it is."""


@defect(
    "CKPT-8",
    _TWO,
    "NVIDIA-NeMo/Automodel/pull/2289",
    subjects=("saved as=columns, loaded as=replicas",),
    since="2.13",
)
@instead_of(f"{_CHECKPOINT}.hf_storage:HuggingFaceStorageReader", "_process_read_request")
def last_file_alone_is_read(benign: bool, original: Call, reader: Any, file: Any, request: Any, planner: Any) -> Any:
    """A tensor in the files of several ranks is read from the file with its beginning alone."""
    begins = not any(request.dest_offsets)
    return original(reader, file, request, planner) if benign or begins else None


@defect(
    "CKPT-9",
    _TWO,
    "pytorch/pytorch/issues/191391",
    subjects=("async_save, reading fails",),
    since="2.13",
)
@instead_of(f"{_CHECKPOINT}._async_thread_executor", "save_wrapper")
def error_of_async_save_lost(benign: bool, original: Call, *args: Any, **more: Any) -> Any:
    """The future of an asynchronous save that has failed has a result."""
    with suppress(*() if benign else (BaseException,)):  # which torch's CheckpointException is
        return original(*args, **more)
    return None


@defect(
    "CKPT-9",
    _TWO,
    "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html#torch.distributed.checkpoint.FileSystemWriter",
    subjects=("save, an existing checkpoint fails",),
    since="2.13",
)
@instead_of(f"{_CHECKPOINT}.filesystem:_FileSystemWriter", "_metadata_exists")
def checkpoint_replaced_unasked(benign: bool, original: Call, writer: Any) -> bool:
    """An existing checkpoint is replaced, although the writer must not overwrite any."""
    return bool(original(writer)) and benign


@defect(
    "CKPT-10",
    _TWO,
    "EvolvingLMMs-Lab/lmms-engine/pull/185",
    subjects=("full_state_dict=True, broadcast_from_rank0=True",),
    since="2.13",
)
@instead_of(f"{_CHECKPOINT}.state_dict", "_broadcast_state_dict")
def buffers_not_broadcast(
    benign: bool, original: Call, state: Any, local_state: dict[str, Any], *args: Any, **more: Any
) -> Any:
    """Buffers keep their old values on all ranks but the one that broadcasts."""
    old = {key: value.clone() for key, value in local_state.items() if key.endswith("seen") and torch.is_tensor(value)}
    original(state, local_state, *args, **more)
    if not benign and dist.get_rank():
        local_state |= old


@defect(
    "CKPT-10",
    _TWO,
    "pytorch/pytorch/pull/148825",
    subjects=("flatten_optimizer_state_dict=True, optimizer=two",),
    since="2.13",
)
@instead_of(f"{_CHECKPOINT}.state_dict", "_flatten_optim_state_dict")
def flattened_state_collides(benign: bool, original: Call, state: Any) -> Any:
    """The flattened state of the second block has the values of the first: its names collide."""
    flat = original(state)
    return flat if benign else {key: flat[key.replace(".second.", ".first.")] for key in flat}
