"""Facts that stand in a report beside its cases: about the machine and its software, and about cells.

No verdict rests on a fact. Facts of cells are derived from the records of a session; nothing here imports torch.
"""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import psutil

from conformance.instruments.communication import Communication
from conformance.plan.substrates import REAL
from conformance.project import IS_CHECKOUT, PROJECT
from conformance.run.devices.hardware import Hardware
from conformance.run.experiment import TRAINING
from conformance.run.record import RECORD_FILE, Header

_SUITE = [PROJECT / name for name in ("conformance", "reference_trainer")]
_CPU_IS_BLIND_TO = "NCCL, CUDA streams, GPU memory, pinned host memory"
_SIMULATION_IS_BLIND_TO = (
    "CUDA's kernels and allocator, NCCL, the driver, fragmentation, speed (the simulated accelerator is a model)"
)
_SHARED_DEVICE_IS_BLIND_TO = "bandwidth, overlap and peer-to-peer copies in worlds that share a GPU"
_PACKAGES = ("torch", "numpy", "pytest", "pytest-xdist", "msgspec", "safetensors")
_VARIABLE_PREFIXES = ("CUBLAS", "CUDA", "GLOO", "MKL", "NCCL", "OMP", "PYTORCH", "TORCH")


# The machine and its software


def environment_facts(hardware: Hardware) -> dict[str, Any]:
    """Return versions, devices, memory, variables that change torch's behaviour, and the suite's commit."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "device": _device(hardware),
        "processor": {"name": _processor_name(), "count": len(os.sched_getaffinity(0))},
        "backends": _backends(hardware),
        "hardware": msgspec.json.decode(msgspec.json.encode(hardware)),
        "memory_bytes": psutil.virtual_memory().total,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLE_PREFIXES)},
        "substrate": hardware.substrate(1, REAL),
        "cannot_show": _cannot_show(hardware),
        "git": _git_commit(),
    }


def _device(hardware: Hardware) -> dict[str, Any]:
    """Device that ranks compute on, if the case and the law allow."""
    if hardware.simulated:
        return {"type": "sim", "name": f"simulated accelerator, schedule {hardware.simulated.schedule}", "count": 1}
    if not hardware.devices:
        return {"type": "cpu", "name": _processor_name(), "count": len(os.sched_getaffinity(0))}
    names = dict.fromkeys(device.name for device in hardware.devices)
    return {"type": "cuda", "name": ", ".join(names), "count": len(hardware.devices), "driver": hardware.driver}


def _cannot_show(hardware: Hardware) -> str:
    """Return the subjects, with commas, that no case can judge on this machine; empty if there are none."""
    if hardware.simulated:
        return _SIMULATION_IS_BLIND_TO
    if not hardware.devices:
        return _CPU_IS_BLIND_TO
    return _SHARED_DEVICE_IS_BLIND_TO if hardware.ranks_per_device > 1 else ""


def _backends(hardware: Hardware) -> dict[str, str]:
    nccl = {"nccl": ".".join(map(str, hardware.nccl))} if hardware.devices else {}
    return {"gloo": "as bundled with torch", **nccl}


@cache
def suite_digest() -> str:
    """Return a digest of all code of the suite and of the trainer."""
    digest = hashlib.sha256()
    for package in _SUITE:
        for file in sorted(package.rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()  # not every architecture has a model name there


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The suite's commit, with `-dirty` if files differ from it; None outside of a checkout.

    An installed wheel may lie in the directory of another project, whose commit is not the suite's.
    """
    if not IS_CHECKOUT:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


# Cells


class Collective(msgspec.Struct, frozen=True, array_like=True):
    """Collective of rank 0; a list in JSON, since a report has many."""

    phase: str
    kind: str
    group: str
    dtype: str
    nbytes: int
    """Bytes of rank 0's input."""


class CellFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about the first training run of a cell."""

    substrate: str
    losses: list[float | None]
    """Losses of all steps, in nats; None where a loss was not finite."""
    step_s: list[float]
    """Raw times of each step after the first, on the slowest rank, without the time that instruments took."""
    calibration_s: float
    """Time of a fixed piece of work at the end of the run, on the slowest rank: steps are compared relative to it."""
    tokens_per_s: float | None
    """Valid tokens of all ranks in the fastest of these steps; None for a run of one step."""
    schedule: list[Collective]
    """Collectives of rank 0 in the last step, in their order."""
    communication: Communication | None = None
    """Communication of rank 0 in the last step; None for a run of one step."""

    @property
    def wire_bytes(self) -> dict[str, int]:
        """Bytes of rank 0's inputs in the last step, by `KIND GROUP DTYPE` of the collective."""
        nbytes = Counter[str]()
        for sent in self.schedule:
            nbytes[f"{sent.kind} {sent.group} {sent.dtype}"] += sent.nbytes
        return dict(sorted(nbytes.items()))

    @property
    def collectives(self) -> dict[str, int]:
        """Number of collectives in the last step, by `PHASE KIND GROUP`."""
        counts = Counter(f"{sent.phase} {sent.kind} {sent.group}" for sent in self.schedule)
        return dict(sorted(counts.items()))


class _Step(msgspec.Struct):
    step: int
    loss: float | None
    valid_tokens: int


class _Collective(msgspec.Struct):
    step: int
    phase: str
    kind: str
    group: str
    nbytes: int
    dtype: str


class _Rank(msgspec.Struct):
    """Fields of `recorder.RankFacts` that are read."""

    steps: list[_Step]
    step_s: list[float]
    calibration_s: float
    collectives: list[_Collective]
    communication: Communication | None = None


class _Run(msgspec.Struct):
    """Fields of `record.RecordFile` that are read."""

    header: Header
    ranks: list[_Rank]
    failure: object = None


def cell_facts(records: Path, *, session: str) -> dict[str, CellFacts]:
    """Return the facts of all cells that a session has trained, by id; `records` is the directory of its records."""
    runs = sorted(_runs(records, session=session), key=lambda run: run.header.cell.id)
    return {run.header.cell.id: _facts(run) for run in runs}


def _runs(records: Path, *, session: str) -> Iterator[_Run]:
    for file in records.glob(f"*/{RECORD_FILE}"):
        run = msgspec.json.decode(file.read_bytes(), type=_Run)
        wanted = run.header.session == session and run.header.experiment == TRAINING and run.header.repeat == 0
        if wanted and run.failure is None and run.ranks:
            yield run


def _facts(run: _Run) -> CellFacts:
    slowest = [max(times) for times in zip(*(rank.step_s for rank in run.ranks), strict=True)]
    steps, last = run.ranks[0].steps, run.ranks[0].steps[-1].step
    rates = [step.valid_tokens / time_s for step, time_s in zip(steps, slowest, strict=True) if time_s > 0][1:]
    return CellFacts(
        substrate=run.header.substrate,
        losses=[step.loss for step in steps],
        step_s=[round(time_s, 6) for time_s in slowest[1:]],
        calibration_s=round(max(rank.calibration_s for rank in run.ranks), 6),
        tokens_per_s=round(max(rates), 1) if rates else None,
        schedule=[
            Collective(sent.phase, sent.kind, sent.group, sent.dtype, sent.nbytes)
            for sent in run.ranks[0].collectives
            if sent.step == last
        ],
        communication=run.ranks[0].communication,
    )
