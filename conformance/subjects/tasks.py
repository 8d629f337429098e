"""Tasks of ranks for subjects: describe one, train its model in one process, and train it on all ranks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from conformance.defects.catalogue import injected
from conformance.experiments.context import device_of, start_process_group
from conformance.instruments import accelerators
from conformance.instruments.capture import shard_indices
from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.gradient_sync import GRADIENT_SYNC
from conformance.instruments.saved_tensors import SavedTensors
from conformance.instruments.sharding import local
from conformance.instruments.tensor_file import write_tensors
from conformance.instruments.writers import Writers
from conformance.numerics.knobs import pin_numerics
from conformance.plan.cells import cell_from_id
from conformance.plan.matrix import TRAINER_CELLS
from conformance.run.ranks.messages import RankContext
from conformance.sim import device as simulated
from conformance.subjects import loading, reference
from conformance.subjects.accelerator import AcceleratorLog
from conformance.subjects.activations import activation_memory, optimizer_bytes
from conformance.subjects.cells import Accumulation, SubjectCell, Workload, subject_cell
from conformance.subjects.crashes import LastCollective
from conformance.subjects.data import all_micro_batches, micro_batches, samples, tensors
from conformance.subjects.decorated import clip_with_torch, load_subject
from conformance.subjects.evidence import FP32_FACTOR, TORCH_ADDS
from conformance.subjects.expectation import write_expected_steps
from conformance.subjects.facts import (
    DescribeJob,
    Description,
    OwnErrors,
    ReferenceFacts,
    ReferenceJob,
    StepsJob,
    SubjectFacts,
    TrainJob,
)
from conformance.subjects.formulas import write_terms
from conformance.subjects.measuring import SubjectRecorder, uninitialised_elements, uninitialised_is_nan
from conformance.subjects.memory_log import BLOCK_BYTES, MemoryLog
from conformance.subjects.noise import raised, runs_with_noise
from conformance.subjects.one_process import on_device
from conformance.subjects.probes import require_sum
from conformance.subjects.protocol import (
    Batch,
    Built,
    LoopedRun,
    Resumable,
    Run,
    SelfShardingRun,
    Subject,
    SubjectMistake,
    reference_name,
)
from conformance.subjects.reference import Trajectory, own_errors, train
from conformance.subjects.shims import used_shims
from conformance.subjects.turning import allowing_turns, distances_if_turned
from conformance.subjects.turns import turns_of
from reference_trainer.mesh import destroy_process_group

REFERENCE_FILE = "reference.safetensors"
"""Tensors of the more accurate process: `initial/NAME`, and by step `stepN/gradient/NAME`, `stepN/parameter/NAME`."""
WEIGHTS_FILE = "weights.safetensors"
"""Initial weights in fp32, by name."""


def describe(context: RankContext, payload: dict[str, Any]) -> Any:
    """Return the Description of the subject that a DescribeJob names."""
    job = msgspec.convert(payload, DescribeJob)
    with loading.noted() as noted:
        subject = _loaded(context, job.subject)
    accumulation: Accumulation = getattr(subject, "accumulation", "any")
    turns = len(turns_of(subject))
    refusals = {
        name: subject.unsupported(
            subject_cell(cell_from_id(name), device=device, accumulation=accumulation, turns=turns)
        )
        for name, device in job.devices.items()
    }
    description = Description(
        versions=dict(subject.versions()),
        shims=[*subject.shims, *used_shims()],
        needs_fresh_processes=getattr(subject, "processes", "shared") == "fresh",
        accumulation=accumulation,
        turns=turns,
        refused={name: reason for name, reason in refusals.items() if reason is not None},
        loads_alike=noted.is_same_on_all_ranks,
    )
    return msgspec.to_builtins(description)


def load(name: str) -> None:
    """Load a subject in a process of which ranks will be forks, as each of them would on processors."""
    pin_numerics("cpu")
    load_subject(name)


def _loaded(context: RankContext, name: str) -> Subject:
    """Return a subject whose module finds the session's accelerator when it is imported."""
    _tolerant(device_of(context))
    return load_subject(name)


def _in_one_process(context: RankContext, name: str) -> Subject:
    """Return a subject whose model one process computes on the type of device that ranks have."""
    device = device_of(context)
    return on_device(_loaded(context, name), device)


def _tolerant(device: torch.device) -> torch.device:
    """Return a device on which kernels without a deterministic form may be used, too.

    Trainers of others may need them. Their order of sums varies, as that of the reference, whose own errors are
    measured on the same device.
    """
    if device.type == "cuda":
        torch.set_deterministic_debug_mode("warn")
    return device


def train_reference(context: RankContext, payload: dict[str, Any]) -> Any:
    """Train a subject's model in one process; returns ReferenceFacts, and writes tensors into the job's directory."""
    job = msgspec.convert(payload, ReferenceJob)
    device = device_of(context)
    subject = _in_one_process(context, job.subject)
    samples(all_micro_batches(subject, job.workload, step=0)[0])  # a wrong batch is told before a model fails with it
    exact, why_not_fp64 = _most_accurate(subject, job.workload)
    max_norm = _limit(subject, exact)
    orders = range(reference.ORDERS)
    runs = [train(subject, job.workload, dtype=torch.float32, order=order, max_norm=max_norm) for order in orders]
    steps = range(len(job.workload.accumulation))
    gradients = [own_errors([run.gradients[step] for run in runs], exact.gradients[step], None) for step in steps]
    reference.require_deterministic(gradients[0])
    dtype = torch.float32 if why_not_fp64 else torch.float64
    turns = [turn.subject for turn in turns_of(subject)]
    for each in turns:
        reference.require_proportional(each, job.workload, dtype=dtype)
    notes = [note for each in turns for note in require_sum(each, job.workload, dtype=dtype)]
    updates = [
        own_errors([run.parameters[step] for run in runs], exact.parameters[step], exact.initial) for step in steps
    ]
    noisy = runs_with_noise(
        subject,
        job.workload,
        exact,
        gradients,
        max_norm=max_norm,
        splits_sums=_runs(subject, lambda cell: "tp" in cell.shape),
    )
    smallest = min(each.overall for each in gradients)
    if _may_clip_exactly(subject, max_norm) and smallest * min(exact.norms) < TORCH_ADDS:
        train_in = partial(train, subject, job.workload, dtype=torch.float32, order=0, max_norm=max_norm)
        noisy.append(train_in(clips_exactly=True))
    if noisy:
        by_gradients = [
            own_errors([run.gradients[step] for run in noisy], exact.gradients[step], None) for step in steps
        ]
        by_updates = [
            own_errors([run.parameters[step] for run in noisy], exact.parameters[step], exact.initial) for step in steps
        ]
        gradients, updates = raised(gradients, by_gradients), raised(updates, by_updates)
    _write(Path(job.directory), exact, runs[0])
    in_bf16 = job.in_bf16 and _runs(subject, lambda cell: cell.precision == "bf16")
    bf16 = _bf16(subject, job.workload, exact, max_norm, updates) if in_bf16 else _Bf16()
    trained = set().union(*exact.gradients)
    model = reference.initial_model(subject, tied=job.workload.tied)
    sentinels = {name: uninitialised_elements(buffer, device=device) for name, buffer in model.named_buffers()}
    facts = ReferenceFacts(
        dtype="fp32" if why_not_fp64 else "fp64",
        why_not_fp64=why_not_fp64,
        parameters=list(exact.initial),
        aliases=reference.aliases(model),
        sentinels=sentinels,
        sentinels_at_most={
            name: max(sentinels[name], buffer.numel() - 1) if sentinels[name] else 0
            for name, buffer in model.named_buffers()
        },
        unsaved_buffers=sorted({name for name, _ in model.named_buffers()} - model.state_dict().keys()),
        untrained=sorted(exact.initial.keys() - trained),
        frozen=[name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        learning_rates=exact.learning_rates,
        max_norm=max_norm,
        losses=exact.losses,
        grad_norms=exact.norms,
        loss_error=_largest(exact.losses, [run.losses for run in runs], [run.losses for run in noisy]),
        norm_error=_largest(exact.norms, [run.norms for run in runs], [run.norms for run in noisy]),
        gradients=gradients,
        updates=updates,
        bf16_gradients=bf16.gradients,
        bf16_updates=bf16.updates,
        bf16_loss_error=bf16.loss_error,
        bf16_matmul_dtypes=bf16.matmul_dtypes,
        kept_in_fp32=bf16.kept,
        activations=activation_memory(subject, job.workload, device, way="fp32"),
        bf16_activations=activation_memory(subject, job.workload, device, way="cast") if in_bf16 else [],
        autocast_activations=activation_memory(subject, job.workload, device, way="autocast") if in_bf16 else [],
        optimizer_bytes=optimizer_bytes(subject, job.workload, device),
        varies=_varies(subject, job.workload),
        turns=len(turns),
        by_products=exact.by_products,
        notes=notes,
    )
    return msgspec.to_builtins(facts)


def train_subject(context: RankContext, payload: dict[str, Any]) -> Any:
    """Train a subject on this rank; returns SubjectFacts, and writes tensors into the job's directory."""
    job = msgspec.convert(payload, TrainJob)
    subject = _loaded(context, job.subject)
    with injected(job.defect):
        return msgspec.to_builtins(_train(context, subject, job))


def train_tapped_subject(context: RankContext, payload: dict[str, Any]) -> Any:
    """Train as `train_subject` does, with taps on all modules, which `conformance.localisation` reads."""
    job = msgspec.convert(payload, TrainJob)
    subject = _loaded(context, job.subject)
    with injected(job.defect):
        facts = _train(context, subject, job, writers=Writers())
    return msgspec.msgpack.decode(msgspec.msgpack.encode(facts))  # with lists in place of tuples


def compute_steps(context: RankContext, payload: dict[str, Any]) -> None:
    """Compute each step of a run in one process, and write it into the job's directory; see `expectation`."""
    job = msgspec.convert(payload, StepsJob)
    write_expected_steps(_in_one_process(context, job.subject), job)


def compute_terms(context: RankContext, payload: dict[str, Any]) -> None:
    """Compute the gradients of each micro-batch in one process, and write them into the directory; see `formulas`."""
    job = msgspec.convert(payload, StepsJob)
    write_terms(_in_one_process(context, job.subject), job)


def _train(context: RankContext, subject: Subject, job: TrainJob, *, writers: Writers | None = None) -> SubjectFacts:
    device = _tolerant(start_process_group(context))
    accelerators.allocate_workspaces(device)
    build = partial(_built, subject, job, device)
    accelerator = None
    if device.type == simulated.NAME:
        last_step = len(job.cell.accumulation) - 1
        accelerator = AcceleratorLog(device, schedule=job.schedule, rank=context.rank, last_step=last_step)
    memory = MemoryLog(device)
    lines = writers or (Writers() if accelerator else None)  # a model on another device is told by the line that put it
    with (
        GRADIENT_SYNC.listening(),
        ExitStack() as uninitialised,
        accelerator.trace.installed() if accelerator else nullcontext(),
        memory.memory.installed(),
    ):
        uninitialised.enter_context(uninitialised_is_nan())
        building = [*([lines.listen_to_outcomes] if lines else []), *memory.memory.listeners]
        with DispatchTap([], outcomes=building) if building else nullcontext():
            run = build()
        recorder = SubjectRecorder(
            run,
            names=job.names,
            aliases=job.aliases,
            last_step=len(job.cell.accumulation) - 1,
            begin=partial(_begin, job, device, uninitialised, lines, memory),
            memory=memory,
            noted=LastCollective(Path(job.directory), rank=context.rank).note,
            writers=writers,
            accelerator=accelerator,
            saved=SavedTensors() if "tp" in job.cell.shape else None,
            is_tensor_parallel="tp" in job.cell.shape,
            kept_in_fp32=job.kept_in_fp32,
        )
        with recorder.listening():
            if not isinstance(run, SelfShardingRun):
                recorder.built()
            losses = _all_steps(subject, job, run, build, recorder)
    facts = recorder.finish(losses, Path(job.directory))
    if recorder.taps:
        recorder.taps.write(Path(job.directory), rank=dist.get_rank())
    facts = msgspec.structs.replace(
        facts,
        batch_bytes=max(_bytes_of(batches, device) for batches in _batches(subject, job, run)),
        dataset_bytes=getattr(run, "dataset_bytes", 0),
    )
    destroy_process_group()
    return facts


def _built(subject: Subject, job: TrainJob, device: torch.device) -> Run | LoopedRun:
    torch.manual_seed(reference.SEED)
    return subject.build(job.cell, device=device, max_norm=job.max_norm)


def built(model: nn.Module, optimizer: Optimizer, max_norm: float) -> None:
    """Do nothing: defects replace this function, to reach a run that is about to take its first step."""


def _begin(
    job: TrainJob,
    device: torch.device,
    uninitialised: ExitStack,
    lines: Writers | None,
    memory: MemoryLog,
    run: Built,
) -> None:
    """After inspection, load the reference weights."""
    uninitialised.close()
    if not job.cell.offload:
        _require_on(device, run.model, lines)
    load_weights(run.model, Path(job.weights), job.aliases)
    if job.is_repeated:
        for group in run.optimizer.param_groups:
            group["lr"] *= 0
    if job.seed:
        torch.manual_seed(reference.SEED + job.seed)
    with memory.listening():
        built(run.model, run.optimizer, job.max_norm)


def _require_on(device: torch.device, model: nn.Module, lines: Writers | None) -> None:
    """Raise SubjectMistake, with the line that put it there if known, for a parameter on another type of device."""
    for name, parameter in model.named_parameters():
        found = local(parameter).device
        if found.type != device.type:
            line = lines.written({name: parameter}).get(name) if lines else None
            place = f" ({Path(line.file).name}:{line.number})" if line else ""
            raise SubjectMistake(
                f"{name} of the parallel model is on {found}{place}, and ranks compute on {device.type}: take the "
                "device from torch.accelerator.current_accelerator(), or from the arguments of build(), in place of a "
                "name such as 'cuda' or 'cpu'"
            )


def _all_steps(
    subject: Subject,
    job: TrainJob,
    run: Run | LoopedRun,
    build: Callable[[], Run | LoopedRun],
    recorder: SubjectRecorder,
) -> list[float]:
    """Take all steps, the last ones with a newly built run if the cell is resumed; returns logged losses."""
    with recorder.unseen():
        batches = _batches(subject, job, run)
    if not job.cell.resumed:
        losses = _trained(run, batches, recorder, first=0)
    else:
        saved_after = job.cell.saved_after
        losses = _trained(run, batches[:saved_after], recorder, first=0)
        run = _resumed(run, build, recorder, Path(job.directory) / "checkpoint")
        losses += _trained(run, batches[saved_after:], recorder, first=saved_after)
    return [float(loss) for loss in losses]


def _batches(subject: Subject, job: TrainJob, run: Built) -> list[list[Batch]]:
    """Return the micro-batches of each step on this rank."""
    workload = job.cell.workload
    turns = len(turns_of(subject))
    steps = [step % turns if job.is_repeated else step for step in range(len(workload.accumulation))]
    return [micro_batches(subject, workload, step=step, data_rank=run.data_rank) for step in steps]


def _bytes_of(batches: Sequence[Batch], device: torch.device) -> int:
    """Return the bytes of micro-batches; the allocator of an accelerator rounds those of each tensor."""
    block_bytes = 1 if device.type == "cpu" else BLOCK_BYTES
    return sum(-(-tensor.nbytes // block_bytes) * block_bytes for batch in batches for tensor in tensors(batch))


def _trained(
    run: Run | LoopedRun, batches: Sequence[Sequence[Batch]], recorder: SubjectRecorder, *, first: int
) -> list[float | Tensor]:
    """Take the steps from the one with the number `first` on; returns the losses that are logged."""
    if isinstance(run, LoopedRun):
        return [*run.train(batches, recorder)]
    return [run.step(step, micro, recorder) for step, micro in enumerate(batches, start=first)]


def _resumed(
    run: Run | LoopedRun, build: Callable[[], Run | LoopedRun], recorder: SubjectRecorder, directory: Path
) -> Run | LoopedRun:
    """Save a run, and return a newly built one that has loaded it."""
    directory.mkdir(exist_ok=True)
    with recorder.not_listening():
        _resumable(run).save(directory)
        dist.barrier()
        resumed = build()
        _resumable(resumed).load(directory)
    recorder.replace(resumed)
    if not isinstance(resumed, SelfShardingRun):
        recorder.built()
    return resumed


def _resumable(run: Run | LoopedRun) -> Resumable:
    if not isinstance(run, Resumable):
        raise SubjectMistake("the run has no methods save and load: let unsupported() refuse cells that are resumed")
    return run


@torch.no_grad()
def load_weights(model: nn.Module, file: Path, aliases: Mapping[str, str]) -> None:
    """Copy this rank's shards of the weights in a file, full tensors by name in the model of one process."""
    with safe_open(file, framework="pt") as weights:
        known = frozenset([*weights.keys(), *aliases])
        for name, parameter in model.named_parameters():
            plain = reference_name(name, known)
            full = weights.get_tensor(aliases.get(plain, plain))
            if parameter.shape != full.shape:
                raise SubjectMistake(
                    f"{plain} of the parallel model has shape {tuple(parameter.shape)} on rank {dist.get_rank()}, and "
                    f"{tuple(full.shape)} in one process: a rank's shard of it, as of experts, must be a DTensor, see "
                    "DTensor.from_local"
                )
            shard = local(parameter)
            shard.copy_(full.flatten()[shard_indices(parameter)] if isinstance(parameter, DTensor) else full)


def _most_accurate(subject: Subject, workload: Workload) -> tuple[Trajectory, str]:
    """Return the run in fp64, or in fp32 for a model that cannot compute in fp64, with the reason."""
    reference.initial_model(subject, tied=workload.tied)  # what is wrong with it is no matter of fp64
    own_limit: float | None = getattr(subject, "max_norm", None)
    try:
        return train(subject, workload, dtype=torch.float64, order=0, max_norm=own_limit), ""
    except reference.REFUSALS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return train(subject, workload, dtype=torch.float32, order=0, max_norm=own_limit), reason


def _limit(subject: Subject, exact: Trajectory) -> float:
    """Return the limit of clipping: the subject's own, or one that clips.

    Raises SubjectMistake for an own one that leaves gradients alone, since wrong clipping would pass.
    """
    own: float | None = getattr(subject, "max_norm", None)
    if own is not None and exact.norms[0] <= own < float("inf"):
        raise SubjectMistake(
            f"max_norm={own:g} clips nothing, the norm at the first step is {exact.norms[0]:.3g}: hand config.max_norm "
            "to the loop, and declare none"
        )
    return reference.half_of(exact.norms[0]) if own is None else own


def _runs(subject: Subject, is_meant: Callable[[SubjectCell], bool]) -> bool:
    """Return whether a subject runs any of the cells that are meant."""
    return any(is_meant(cell) and subject.unsupported(cell) is None for cell in map(subject_cell, TRAINER_CELLS))


def _may_clip_exactly(subject: Subject, max_norm: float) -> bool:
    """Return whether gradients may be clipped by another function than torch's, which adds a little to the norm."""
    return getattr(subject, "clip", None) is not clip_with_torch and max_norm < math.inf


class _Bf16(NamedTuple):
    """Results of training in bf16 in one process; empty where nothing computes in bf16."""

    gradients: OwnErrors | None = None
    updates: list[OwnErrors] = []  # noqa: RUF012 - never changed
    loss_error: float = 0.0
    matmul_dtypes: list[str] = []  # noqa: RUF012
    kept: list[str] = []  # noqa: RUF012


def _bf16(
    subject: Subject, workload: Workload, exact: Trajectory, max_norm: float, in_fp32: Sequence[OwnErrors]
) -> _Bf16:
    """Return the own errors of training in bf16 by autocast, and with cast parameters if the model can be cast.

    `in_fp32` are the own errors of updates in fp32, by step. A model that adds a tensor in fp32 to its first
    activations has none in bf16 with cast parameters, while FSDP2 casts inputs again where a group begins: autocast
    tells the dtypes of its products then, and no layer is one that its code keeps in fp32.
    """
    kept = reference.kept_in_fp32(turns_of(subject)[0].subject, workload)
    way = reference.InBf16("autocast")
    train_in = partial(train, subject, workload, dtype=torch.float32, order=0, max_norm=max_norm)
    runs = [train_in(in_bf16=way)]
    with suppress(*reference.REFUSALS):
        cast = reference.InBf16("cast", kept)
        runs.append(train_in(in_bf16=cast))
        way, kept = (cast, kept) if cast.matmul_dtypes else (way, [])
    turned = distances_if_turned(subject, exact, max_norm)
    updates = []
    for step, (after, told) in enumerate(zip(exact.parameters, in_fp32, strict=True)):
        in_each = [run.parameters[step] for run in runs]
        errors = own_errors(in_each, after, exact.initial, in_fp32=told)
        updates.append(allowing_turns(errors, turned, in_each, after, exact.initial, told))
    first = [{name: run.gradients[0][name] for name in exact.gradients[0]} for run in runs]
    loss_error = max(_relative(run.losses, exact.losses) for run in runs)
    return _Bf16(own_errors(first, exact.gradients[0], None), updates, loss_error, way.matmul_dtypes, kept)


def _write(directory: Path, exact: Trajectory, single: Trajectory) -> None:
    written: dict[str, Tensor] = {f"initial/{name}": tensor for name, tensor in exact.initial.items()}
    for step, (gradients, parameters) in enumerate(zip(exact.gradients, exact.parameters, strict=True)):
        written |= {f"step{step}/gradient/{name}": tensor for name, tensor in gradients.items()}
        written |= {f"step{step}/parameter/{name}": tensor for name, tensor in parameters.items()}
    write_tensors(directory / REFERENCE_FILE, _contiguous(written))
    write_tensors(directory / WEIGHTS_FILE, _contiguous(single.initial))


def _contiguous(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in named.items()}


def _largest(exact: list[float], runs: Iterable[list[float]], noisy: Iterable[list[float]]) -> float:
    """Return the largest deviation of the numbers of runs, see `noise.raised`."""
    own = [_relative(run, exact) for run in runs]
    return max(own + [_relative(run, exact) / FP32_FACTOR for run in noisy])


def _relative(measured: list[float], exact: list[float]) -> float:
    return max(abs(m - e) / abs(e) if e else abs(m) for m, e in zip(measured, exact, strict=True))


def _varies(subject: Subject, workload: Workload) -> bool:
    """Return whether `count` differs between ranks in some step."""
    steps, ranks = range(len(workload.accumulation)), range(workload.data_ranks)
    counts = [
        {sum(map(subject.count, micro_batches(subject, workload, step=step, data_rank=rank))) for rank in ranks}
        for step in steps
    ]
    return any(len(step_counts) > 1 for step_counts in counts)
