"""Set-up that all experiments share: configuration, weight files, device, process group, and the session's defect."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_type_hints
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh

from conformance.defects.catalogue import injected, subjects_of
from conformance.numerics.knobs import pin_numerics
from conformance.plan.cells import compiled_on_device
from conformance.run.experiment import Experiment, Job, Needs, Processes, Result, sampled_ranks
from conformance.run.ranks.messages import RankContext
from conformance.run.ranks.process_groups import hold_process_groups
from conformance.sim import device as simulated
from conformance.sim import schedules
from conformance.sim.building import LIBRARY_VARIABLE
from conformance.sim.schedules import Schedule
from conformance.torch_coverage.recording import recording
from conformance.torch_coverage.seen import VARIABLE
from reference_trainer.config import ModelConfig, TrainerConfig
from reference_trainer.init_weights import init_weights
from reference_trainer.mesh import backends, build_mesh, destroy_process_group, init_process_group
from reference_trainer.mixed_precision import torch_dtype
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh
from reference_trainer.precision import PRECISIONS
from reference_trainer.train import Trainer
from reference_trainer.weights import to_hf_name

World = Literal["ranks", "simulated", "sampled", "none", "ring"]
"""World in which an experiment takes place.

`ranks`: every rank of the cell, in one process group. `simulated`: one process, which is rank 0 of torch's fake process
group of the cell's size. `sampled`: one process for each of the cell's ranks that `run.experiment.sampled_ranks`
names, in a fake process group of its own. `none`: one process without a process group and without the
session's defect, for values with which laws compare. `ring`: one such process for each of the ranks that share
samples."""
_PROCESSES: Mapping[World, Processes] = {
    "ranks": "ranks",
    "simulated": "one",
    "sampled": "sampled",
    "none": "one",
    "ring": "ring",
}


@dataclass(frozen=True)
class RankWorld:
    """One rank of an experiment, with its world."""

    context: RankContext
    job: Job
    config: TrainerConfig
    device: torch.device

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.context.rank

    @property
    def size(self) -> int:
        """Number of ranks in the cell's world, simulated or not."""
        return self.job.world_size

    @property
    def subjects(self) -> frozenset[str]:
        """Subjects to which the job's defect restricts sweeps, see `Defect.subjects`; empty for all."""
        return subjects_of(self.job.defect)

    @property
    def sweep_share(self) -> float:
        """Share of its samples that a sweep tries; 1 if a defect names its subjects."""
        return 1.0 if self.subjects else self.job.sweep_share

    @property
    def is_last(self) -> bool:
        """True if this rank has the highest number."""
        return self.rank == self.size - 1

    @property
    def mapped_bytes(self) -> list[int]:
        """Sizes of the files that building the model maps into memory, which memory ledgers leave out."""
        return [Path(self.config.checkpoint).stat().st_size] if self.config.checkpoint else []

    @property
    def directory(self) -> Path:
        """Directory for files of the ranks."""
        return Path(self.job.directory)

    @property
    def dims(self) -> ParallelDims:
        """Degrees of parallelism."""
        return resolve_mesh(self.config.mesh, world_size=self.size)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Device mesh of the configuration."""
        return build_mesh(self.dims, self.device)

    def trainer(self, observer: Observer | None = None, *, config: TrainerConfig | None = None) -> Trainer:
        """Return a trainer of this rank; `config` replaces the configuration of the cell."""
        return Trainer(config or self.config, device=self.device, world_size=self.size, observer=observer)


def experiment(
    *, needs: Needs, world: World = "ranks", process_group: bool = True, takes_share: bool = False
) -> Callable[[Callable[[RankWorld], Result]], Experiment[Result]]:
    """Make an experiment of a function whose result consists of builtin types and msgspec structs.

    With `process_group=False` the function makes the process group itself; with `takes_share` it is a sweep that tries
    `sweep_share` of its samples.
    """

    def declare(function: Callable[[RankWorld], Result]) -> Experiment[Result]:
        def perform(context: RankContext, job: Job) -> Result:
            with rank_world(context, job, world=world, process_group=process_group) as rank:
                if VARIABLE not in os.environ or world in ("none", "ring"):  # such a process computes expected values
                    return function(rank)
                with recording(Path(job.kept), rank.device):
                    return function(rank)

        return Experiment(
            name=f"{function.__module__}:{function.__name__}",
            needs=needs,
            processes=_PROCESSES[world],
            takes_share=takes_share,
            result=get_type_hints(function)["return"],
            perform=perform,
        )

    return declare


@contextmanager
def rank_world(context: RankContext, job: Job, *, world: World, process_group: bool = True) -> Iterator[RankWorld]:
    """Set up a rank, inject the job's defect, and destroy the process group of a world that ended well.

    As in a trainer that has it, the defect is present while the process group is made and destroyed: a defect of c10d
    may show in either. After an error nothing is destroyed: other ranks may be in a collective, and the process serves
    no further task.
    """
    if world == "sampled" and job.weights == "dcp":  # DCP's plans come from rank 0, of which other ranks are without
        job = msgspec.structs.replace(job, weights="safetensors", config=_from_safetensors(job.config))
    config = _with_weights(context, job, shared=world == "ranks")
    config = compiled_on_device(config) if context.device else config
    if world in ("none", "ring"):
        yield RankWorld(context, job, config, device_of(context))
        return
    with injected(job.defect):
        if world in ("simulated", "sampled"):
            simulated_rank = sampled_ranks(config, job.world_size)[context.rank]
            with simulated_world(job.world_size, rank=simulated_rank):
                yield RankWorld(context, job, config, torch.device("cpu"))
            return
        device = start_process_group(context) if process_group else device_of(context)
        yield RankWorld(context, job, config, device)
        if dist.is_initialized():  # an experiment that makes its groups in other processes leaves none
            if device.type == "cpu":
                hold_process_groups()
            destroy_process_group()


def device_of(context: RankContext) -> torch.device:
    """Return the device that the rank has leased, the only one that CUDA shows to it, the simulated one, or the CPU.

    On a device every knob of bitwise determinism is pinned, see `pin_numerics`.
    """
    if LIBRARY_VARIABLE in os.environ:
        return _simulated_device(context)
    device = torch.device("cuda", 0) if context.device else torch.device("cpu")
    pin_numerics(device)
    if context.device:
        torch.cuda.set_device(device)
    return device


def _simulated_device(context: RankContext) -> torch.device:
    """Return the simulated device as a new process has it, with the schedule of the session.

    Each rank draws a random schedule of its own.
    """
    pin_numerics("cpu")  # whose kernels compute
    simulated.load(Path(os.environ[LIBRARY_VARIABLE]))
    schedule = Schedule.parse(os.environ[schedules.VARIABLE])
    simulated.follow(schedule.for_rank(context.rank))
    simulated.poison(True)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    return simulated.device()


def start_process_group(context: RankContext, *, backend: str | None = None) -> torch.device:
    """Make the default process group, by default with backends for host and device; returns the device of this rank.

    All ranks leave the set-up together, so that every rank sees files that rank 0 has written before.
    """
    device = device_of(context)
    init_process_group(
        backend or (simulated.BACKENDS if device.type == simulated.NAME else backends(device, cpu_tensors=True)),
        init_method=context.rendezvous,
        rank=context.rank,
        world_size=context.world_size,
        timeout_s=context.timeout_s,
    )
    if backend is None:
        dist.all_reduce(torch.zeros(1, dtype=torch.float32))  # on the CPU: needs no backend of a device
    return device


def _with_weights(context: RankContext, job: Job, *, shared: bool) -> TrainerConfig:
    """Return the job's configuration, with the checkpoint that it names in the job's directory.

    Rank 0 writes it, or if ranks do not share it, each its own.
    """
    if job.config.checkpoint is None:
        return job.config
    directory = Path(job.directory) if shared else Path(job.directory, str(context.rank))
    directory.mkdir(exist_ok=True)
    path = directory / job.config.checkpoint
    config = msgspec.structs.replace(job.config, checkpoint=str(path))
    if context.rank == 0 or not shared:
        write_weights(path, config, form=job.weights)
    return config


def _from_safetensors(config: TrainerConfig) -> TrainerConfig:
    return msgspec.structs.replace(config, checkpoint="initial.safetensors")


@contextmanager
def simulated_world(size: int, *, rank: int = 0, device_type: str = "cpu") -> Iterator[None]:
    """Make this process one rank of a world of this size, with tensors on a type of device.

    Raises RuntimeError for a torch without the fake backend.
    """
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no fake process group: {error}") from None
    backends = ",".join(f"{each}:fake" for each in dict.fromkeys(("cpu", device_type)))
    dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=size)
    try:
        with (
            patch.object(dist, "recv", _receive_ones),
            patch.object(dist, "all_to_all_single", _exchange_with_ranks_alike),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _receive_ones(tensor: Tensor, *_arguments: Any, **_options: Any) -> None:
    """Receive from a peer that agrees: the stages of a pipeline ask each other whether all know their shapes.

    The fake process group would leave the tensor as it is. torch.distributed.pipelining votes so from 2.13 on
    (`_warmup_forward_vote` in torch/distributed/pipelining/stage.py).
    """
    tensor.fill_(1)


def _exchange_with_ranks_alike(
    output: Tensor, given: Tensor, *_sizes: Any, group: dist.ProcessGroup, **_options: Any
) -> None:
    """Receive from ranks that send as many rows to this one as it keeps for itself; the rows are zeros.

    The fake process group would leave numbers of rows as they are: uninitialised.
    """
    if output.is_floating_point():
        output.zero_()
    else:
        output.copy_(given[group.rank()].expand_as(output))


def write_weights(path: Path, config: TrainerConfig, *, form: str) -> None:
    """Write weights sampled by one process, in the dtype with which the trainer builds the model.

    `form` is a value of the axis `weights`.
    """
    model = Transformer(config.model)
    init_weights(model, seed=config.seed)
    dtype = torch_dtype(PRECISIONS[config.precision].build or "float32")
    tensors = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    match form:
        case "hf":
            _write_hf(path, tensors, config.model)
        case "dcp":
            save(dict(tensors), checkpoint_id=path, no_dist=True)
        case _:
            save_file(tensors, path)


def _write_hf(directory: Path, tensors: dict[str, Tensor], config: ModelConfig) -> None:
    """Write two files, as for a large model, and their index."""
    directory.mkdir(exist_ok=True)  # a run that is saved and resumed writes the same files twice
    names = {name: to_hf_name(name) for name in tensors}
    files = {name: f"model-{1 + index % 2:05}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in sorted(set(files.values())):
        save_file({names[name]: tensors[name] for name in tensors if files[name] == file}, directory / file)
    index = {"metadata": {}, "weight_map": {names[name]: file for name, file in files.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = {
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
    }
    (directory / "config.json").write_text(json.dumps(settings))
