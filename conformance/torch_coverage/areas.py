"""Areas of torch whose coverage is measured: their files, and the modules of which people take their interfaces."""

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec


class Area(msgspec.Struct, frozen=True):
    """Some of torch's modules, with their public ones."""

    name: str
    files: Sequence[str]
    """Patterns of files below torch's directory."""
    public: Sequence[str]
    """Modules whose public names are the area's interface; a version may lack some."""
    but: Sequence[str] = ()
    """Patterns of files that belong to other areas."""


_CHECKPOINT = ("state_dict", "state_dict_saver", "state_dict_loader", "planner", "default_planner", "storage")
_MORE_CHECKPOINT = ("filesystem", "hf_storage", "staging", "stateful", "metadata", "format_utils", "optimizer")
AREAS = (
    Area("fully_shard", ["distributed/fsdp/_fully_shard/*.py"], ["torch.distributed.fsdp"]),
    Area(
        "tensor",
        ["distributed/tensor/**/*.py"],
        ["torch.distributed.tensor", "torch.distributed.tensor.placement_types"],
        but=["distributed/tensor/_ops/*.py", "distributed/tensor/parallel/*.py"],
    ),
    Area("tensor operators", ["distributed/tensor/_ops/*.py"], []),
    Area("tensor.parallel", ["distributed/tensor/parallel/*.py"], ["torch.distributed.tensor.parallel"]),
    Area(
        "pipelining",
        ["distributed/pipelining/*.py"],
        [
            "torch.distributed.pipelining",
            *(f"torch.distributed.pipelining.{name}" for name in ("stage", "schedules", "microbatch")),
        ],
    ),
    Area(
        "checkpoint",
        ["distributed/checkpoint/**/*.py"],
        [
            "torch.distributed.checkpoint",
            *(f"torch.distributed.checkpoint.{name}" for name in (*_CHECKPOINT, *_MORE_CHECKPOINT)),
        ],
    ),
    Area("clip_grad", ["nn/utils/clip_grad.py"], ["torch.nn.utils.clip_grad"]),
    Area("grad_scaler", ["amp/grad_scaler.py"], ["torch.amp.grad_scaler"]),
    Area("optim", ["optim/*.py"], ["torch.optim"], but=["optim/lr_scheduler.py", "optim/swa_utils.py"]),
)


@cache
def torch_directory() -> Path:
    """Return the directory of the installed torch, which is not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@cache
def area_of_files() -> dict[str, str]:
    """Return the name of the area of each measured file, by its path below torch's directory."""
    root = torch_directory()
    areas = {}
    for area in AREAS:
        others = {file for pattern in area.but for file in root.glob(pattern)}
        for file in sorted({file for pattern in area.files for file in root.glob(pattern)} - others):
            areas[file.relative_to(root).as_posix()] = area.name
    return areas
