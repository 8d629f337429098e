"""Schedules of torch.distributed.pipelining with any two of their options, over several calls.

Each row of a covering array makes stages and a schedule, and calls it as training and evaluation do. After each call
outputs, losses, parameters, gradients, buffers and numbers of calls are compared with one process, in every bit.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import Replicate, Shard, distribute_module

from conformance.covering_arrays.combinations import Rule
from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from conformance.sweeps.covering_sweep import CoveringSweep, Draw, Options, forbids, needs
from conformance.sweeps.drawing import draw_of
from conformance.sweeps.layouts import difference, distributed
from conformance.sweeps.pipeline_stages import (
    Batch,
    Layout,
    PlainPipeline,
    Seen,
    Stage,
    change,
    loss_of,
    seen_of,
)
from conformance.sweeps.trials import End, Ended, Swept, Trials

SCHEDULES: dict[str, Callable[..., Any]] = {
    name.removeprefix("Schedule"): value
    for name, value in sorted(vars(pipelining).items())
    if name.startswith("Schedule") and inspect.isclass(value)
}
"""Schedules that the installed torch has."""
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that place stages there and back again: their signatures do not say so."""

_REDUCTION = getattr(schedules, "REDUCE_GRAD", None)
"""Action of a schedule that reduces the gradients of a stage; None if the installed torch has none."""

DTENSORS = {"replicated DTensors": Replicate(), "sharded DTensors": Shard(2)}
"""Placements of activations over the second dimension of the mesh, by value of `second_dim`."""

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "schedule": ("GPipe", *(name for name in SCHEDULES if name != "GPipe")),
    "stages_per_rank": ("usual", 1, 3),
    "micro_batches": ("as stages", "one", "many", "uneven"),
    "calls": (
        "step",
        "step+step",
        "step+clear+step",
        "step+update+step",
        "eval+step",
        "step+eval+step",
        "step+eval+update+eval+step",
        "step+freeze first+update+step",
        "step+thaw first+update+step",
        "twelve updates",
    ),
    "loss_fn": ("sum", "mean", "keyword", "none"),
    "scale_grads": (True, False),
    "losses": (True, False),
    "return_outputs": (True, False),
    "metadata": (
        "inferred",
        "given",
        "given with gradients",
        "given without requires_grad",
        "given on the first rank",
    ),
    "chunk_specs": ("default", "given", "along dim 1", "of outputs"),
    "kwargs": ("none", "tensor", "number", "nested"),
    "passed": ("tensor", "two tensors", "input", "without gradient", "unused", "list", "view", "bf16", "transposed"),
    "outputs": ("tensor", "tuple", "view", "dict"),
    "frozen": ("none", "first", "second", "last", "all but last"),
    "input_requires_grad": (False, True),
    "stage": ("plain", "checkpointed", "shared weight", "buffer", "hooks", "parameter hooks", "dw_builder"),
    "second_dim": ("none", "fsdp", "resharding fsdp", *DTENSORS),
    "defer_pp_recv": (False, True),
    "backward_requires_autograd": (True, False),
    "gradients_reduced_by": ("schedule", "function"),
}
"""Values of each option; the first is the default. A test compares them with the signatures of the installed torch."""


def is_single(schedule: str) -> bool:
    """Return whether a schedule has one stage on each rank."""
    return "stage" in _parameters(schedule)


def _parameters(schedule: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(SCHEDULES[schedule]).parameters


def _lacks(row: Options) -> bool:
    """Return whether the signature of the schedule lacks an option, or its placement other numbers of stages."""
    names = {
        "chunk_specs": "output_merge_spec" if row["chunk_specs"] == "of outputs" else "args_chunk_spec",
        "defer_pp_recv": "defer_pp_recv",
        "backward_requires_autograd": "backward_requires_autograd",
    }
    parameters = _parameters(row["schedule"])
    lacks = any(row[option] != OPTIONS[option][0] and name not in parameters for option, name in names.items())
    lacks |= row["gradients_reduced_by"] == "function" and not _takes_function(row["schedule"])
    fixed = is_single(row["schedule"]) or row["schedule"] in _V_SHAPED
    return lacks or (fixed and row["stages_per_rank"] != "usual")


def _takes_function(schedule: str) -> bool:
    """Return whether a function can replace the reduction of gradients, which torch 2.11 has no action for."""
    return _REDUCTION is not None and hasattr(SCHEDULES[schedule], "register_custom_function")


def _is_known(second_dim: str, metadata: str) -> bool:
    """Return whether metadata of activations can be given: of sharded DTensors the layouts of gradients are open."""
    if second_dim not in DTENSORS or metadata == "inferred":
        return True
    return second_dim == "replicated DTensors" and metadata in ("given", "given with gradients")


RULES = (
    Rule(
        (
            *("schedule", "stages_per_rank", "chunk_specs", "defer_pp_recv", "backward_requires_autograd"),
            "gradients_reduced_by",
        ),
        _lacks,
    ),
    # FSDP calls hooks on the gradients of shards.
    forbids("stage", "second_dim", when=lambda stage, parallel: stage == "parameter hooks" and parallel != "none"),
    # DTensors meet schedules, calls, losses and metadata, which have the layouts of gradients if they are replicated.
    *needs(
        OPTIONS,
        *(
            (option, "second_dim", *(value for value in OPTIONS["second_dim"] if value not in DTENSORS))
            for option in ("kwargs", "passed", "outputs", "frozen", "input_requires_grad", "stage")
        ),
    ),
    forbids("second_dim", "metadata", when=lambda parallel, given: not _is_known(parallel, given)),
    forbids("second_dim", "chunk_specs", when=lambda parallel, specs: parallel in DTENSORS and specs == "along dim 1"),
    # A pipeline of two stages trains nothing.
    forbids("calls", "frozen", when=lambda calls, frozen: "freeze first" in calls and frozen in ("second", "last")),
    # Specs of nested inputs have their structure.
    forbids("kwargs", "chunk_specs", when=lambda kwargs, specs: kwargs == "nested" and specs != "default"),
    # Integers have no second dimension; process groups send contiguous tensors alone, which chunks along it are not.
    forbids(
        *("passed", "chunk_specs"),
        when=lambda passed, specs: passed in ("without gradient", "input") and specs == "along dim 1",
    ),
    # A deferred receive may take the message of another, and one of another size ends the process.
    forbids("passed", "defer_pp_recv", when=lambda passed, defers: passed == "without gradient" and defers),
    # Rounded gradients.
    forbids("passed", "loss_fn", when=lambda passed, loss: passed == "bf16" and loss in ("sum", "keyword")),
)


def layout_of(options: Options, ranks: int) -> Layout:
    """Return the numbers of a pipeline over so many ranks."""
    usual = 1 if is_single(options["schedule"]) else 2
    stages = ranks * (usual if options["stages_per_rank"] == "usual" else options["stages_per_rank"])
    number = {"as stages": stages, "one": 1, "many": 3 * stages, "uneven": stages + 1}
    return Layout(ranks, stages, number[options["micro_batches"]])


def stages_on(rank: int, options: Options, layout: Layout) -> list[int]:
    """Return the stages of a rank in their order."""
    if options["schedule"] in _V_SHAPED:
        return [rank, layout.stages - 1 - rank]
    return list(range(rank, layout.stages, layout.ranks))


class Pipeline:
    """Stages of a rank, their schedule, and the calls of a row."""

    def __init__(self, options: Options, mesh: DeviceMesh) -> None:
        self._options, self._rank = options, mesh.get_local_rank(0)
        self._second_dim = mesh[_dim(mesh)] if mesh.ndim > 1 else None
        self._placement = DTENSORS.get(options["second_dim"])
        self._replica = mesh.get_local_rank(1) if mesh.ndim > 1 and self._placement is None else 0
        self.layout = layout_of(options, mesh.size(0))
        owned = stages_on(self._rank, options, self.layout)
        self.modules = {index: self._module(index) for index in owned}
        stages = [self._stage(index, mesh) for index in owned]
        self.has_first, self.has_last = 0 in owned, self.layout.stages - 1 in owned
        self.gives_losses = options["losses"] and options["loss_fn"] != "none"
        self._schedule = self._made(stages)

    def call(self, name: str, number: int) -> Seen:
        """Perform a call; returns the state after it."""
        returned, losses, batch = None, list[Tensor](), None
        if name in ("step", "eval"):
            batch = Batch.of(number, self._replica, self.layout, self._options)
            batch.x = self._placed(batch.x)
            returned = self._computed(name, batch, losses)
        else:
            change(list(self.modules.values()), name)
        gradient = batch.x.grad if batch is not None and self.has_first else None
        return seen_of(self.modules, returned, losses, gradient)

    def _computed(self, name: str, batch: Batch, losses: list[Tensor]) -> Any:
        options = self._options
        arguments: dict[str, Any] = {**batch.kwargs}
        if options["loss_fn"] != "none":
            if self.has_last:
                arguments["target"] = batch.target
            if options["losses"]:
                arguments["losses"] = losses
            if options["loss_fn"] == "keyword" and name == "step":
                arguments["loss_kwargs"] = {"factor": 2.0}
        if not options["return_outputs"]:
            arguments["return_outputs"] = False
        inputs = (batch.x,) if self.has_first else ()
        with torch.no_grad() if name == "eval" else nullcontext():
            return getattr(self._schedule, name)(*inputs, **arguments)

    def _placed(self, x: Tensor) -> Tensor:
        """Return a tensor as the activations are laid out, as a leaf that needs gradients if the tensor does."""
        if self._placement is None or self._second_dim is None:
            return x
        return distributed(x.detach(), self._second_dim, (self._placement,)).requires_grad_(x.requires_grad)

    def _module(self, index: int) -> nn.Module:
        stage = Stage(index, self.layout, self._options, placement=self._placement)
        if self._options["stage"] == "parameter hooks":
            for parameter in stage.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda _: stage.calls.update(["gradients of parameters"])
                    )
        if self._options["second_dim"] == "none":
            return stage
        if self._placement is not None:
            return distribute_module(stage, self._second_dim)
        resharded = self._options["second_dim"] != "fsdp"
        return cast("nn.Module", fully_shard(stage, mesh=self._second_dim, reshard_after_forward=resharded))

    def _stage(self, index: int, mesh: DeviceMesh) -> PipelineStage:
        arguments: dict[str, Any] = {}
        if self._options["metadata"].startswith("given") and (
            self._options["metadata"] != "given on the first rank" or self._rank == 0
        ):
            arguments = {"input_args": self._examples(index), "output_args": self._examples(index + 1)}
            if self._options["metadata"] == "given with gradients":
                for kind in ("input", "output"):
                    arguments[f"{kind}_grads"] = _gradients_like(arguments[f"{kind}_args"])
        if self._placement is not None:
            arguments["get_mesh"] = lambda *_: self._second_dim
        if self._options["stage"] == "dw_builder":
            arguments["dw_builder"] = lambda: lambda: None
        return PipelineStage(
            self.modules[index], index, self.layout.stages, torch.device("cpu"), group=mesh.get_group(0), **arguments
        )

    def _examples(self, index: int) -> tuple[Tensor, ...]:
        """Return empty tensors like the inputs of a stage, or like the outputs of the last."""
        batch = Batch.of(0, 0, self.layout, self._options)
        x, kwargs, _ = next(batch.micro_batches(self.layout, self._options))
        out: Any = x.requires_grad_(self._options["input_requires_grad"])
        for each in range(index):
            stage = Stage(each, self.layout, self._options)
            out = stage(*(out if isinstance(out, tuple | list) else (out,)), **kwargs)
        tensors = tuple(out.values()) if isinstance(out, dict) else out if isinstance(out, tuple | list) else (out,)
        with_grad = self._options["metadata"] != "given without requires_grad"
        trains = self._options["loss_fn"] != "none"
        return tuple(
            self._placed(
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype).requires_grad_(
                    each.requires_grad and with_grad and trains
                )
            )
            for each in tensors
        )

    def _made(self, stages: list[PipelineStage]) -> Any:
        options = self._options
        arguments: dict[str, Any] = {"scale_grads": options["scale_grads"]}
        if options["loss_fn"] != "none":
            arguments["loss_fn"] = lambda out, target, **given: loss_of(out, target, options, self.layout, **given)
        if options["chunk_specs"] != "default":
            dim = int(options["chunk_specs"] == "along dim 1")
            at = TensorChunkSpec(dim)  # type: ignore[no-untyped-call]
            arguments["output_merge_spec"] = {"tuple": (at, at), "dict": {"out": at}}.get(options["outputs"], at)
        if options["chunk_specs"] in ("given", "along dim 1"):
            arguments["args_chunk_spec"] = TensorChunkSpec.from_tuple((dim,)) if self.has_first else None
            if options["kwargs"] in ("none", "tensor"):
                names = ["offset"] if options["kwargs"] == "tensor" else []
                arguments["kwargs_chunk_spec"] = TensorChunkSpec.from_dict(dict.fromkeys(names, dim))
        for option in ("defer_pp_recv", "backward_requires_autograd"):
            if options[option] != OPTIONS[option][0]:
                arguments[option] = options[option]
        owned: Any = stages[0] if is_single(options["schedule"]) else stages
        made = get_schedule_class(options["schedule"])(owned, self.layout.micro_batches, **arguments)
        if options["gradients_reduced_by"] == "function":
            factor = self.layout.micro_batches if options["scale_grads"] else 1
            by_index = {stage.stage_index: stage for stage in stages}
            made.register_custom_function(
                _REDUCTION, lambda action, _context: by_index[action.stage_index].perform_reduce_grad(factor)
            )
        return made


def _gradients_like(examples: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Return empty tensors like the gradients of examples; None for those that need none."""
    return tuple(torch.empty_like(each).detach() if each.requires_grad else None for each in examples)


def _dim(mesh: DeviceMesh) -> str:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names[1]


_TWELVE = ("step", "update") * 12


def differences(options: Options, mesh: DeviceMesh) -> dict[str, str]:
    """Perform the calls of a row; returns the faults after this rank's first call that has any, with texts."""
    replicas, replica = (mesh.size(1), mesh.get_local_rank(1)) if mesh.ndim > 1 else (1, 0)
    pipeline = Pipeline(options, mesh)
    if options["second_dim"] in DTENSORS:
        replica = 0
    averaged = range(replicas) if "fsdp" in options["second_dim"] else [replica]
    plain = PlainPipeline(pipeline.layout, averaged, replica, options)
    found: dict[str, str] = {}
    for number, call in enumerate(_TWELVE if options["calls"] == "twelve updates" else options["calls"].split("+")):
        seen, wanted = pipeline.call(call, number), plain.call(call, number)
        faults = dict(_faults(pipeline, seen, wanted))  # on all ranks, with collectives; others may be right
        found = found or {fault: f"after call {number + 1}, {call}: {text}" for fault, text in faults.items()}
    return found


def _faults(pipeline: Pipeline, seen: Seen, wanted: Seen) -> Iterator[tuple[str, str]]:
    """Yield the faults of this rank's stages, each with a text."""
    owned = {str(index) for index in pipeline.modules}
    yield from _returned_faults(seen.returned, wanted.returned if pipeline.has_last else None)
    expects_losses = pipeline.has_last and pipeline.gives_losses
    yield from _tensors_faults("losses", dict(enumerate(seen.losses)), dict(enumerate(wanted.losses)), expects_losses)
    if pipeline.has_first:
        yield from _tensor_faults("input gradient", "x.grad", seen.input_gradient, wanted.input_gradient)
    for fault, measured, expected in (
        ("parameter", seen.parameters, wanted.parameters),
        ("gradient", seen.gradients, wanted.gradients),
        ("buffer", seen.buffers, wanted.buffers),
    ):
        for name, value in measured.items():
            yield from _tensor_faults(fault, name, value, cast("Mapping[str, Tensor | None]", expected)[name])
    calls = {name: count for name, count in wanted.calls.items() if name.split(",")[0] in owned}
    if seen.calls != calls:
        yield "hooks", f"called {seen.calls}, expected {calls}"


def _returned_faults(measured: Any, wanted: Any) -> Iterator[tuple[str, str]]:
    if measured is None or wanted is None:
        if measured is not wanted:
            yield "output", f"{'nothing' if measured is None else 'something'} is returned"
        return
    if isinstance(measured, dict) and measured.keys() == wanted.keys():
        measured, wanted = list(measured.values()), list(wanted.values())
    if not isinstance(measured, tuple | list):
        measured, wanted = [measured], [wanted]
    if len(measured) != len(wanted):
        yield "output", f"{len(measured)} tensors, expected {len(wanted)}"
        return
    for index, (each, other) in enumerate(zip(measured, wanted, strict=True)):
        yield from _tensor_faults("output", f"output {index}", each, other)


def _tensors_faults(
    fault: str, measured: Mapping[int, Tensor], wanted: Mapping[int, Tensor], is_expected: bool
) -> Iterator[tuple[str, str]]:
    if not is_expected:
        wanted = {}
    if len(measured) != len(wanted):
        yield fault, f"{len(measured)}, expected {len(wanted)}"
        return
    for index, value in measured.items():
        yield from _tensor_faults(fault, f"micro-batch {index}", value, wanted[index])


def _tensor_faults(fault: str, name: str, measured: Tensor | None, wanted: Tensor | None) -> Iterator[tuple[str, str]]:
    if text := difference(measured, wanted, bound=0.0):
        yield fault, f"{name}: {text}"


_HALVING = ("DualPipeV", "InterleavedZeroBubble", "ZBVZeroBubble")
"""Schedules that halve backwards."""
_EVALUATED_LATER = tuple(calls for calls in OPTIONS["calls"] if calls.startswith("step+eval"))
_SEVERAL_STEPS = tuple(calls for calls in OPTIONS["calls"] if calls != "step" and "eval" not in calls)
REFUSALS: tuple[Options, ...] = (
    # Documented: as many micro-batches as stages, or a multiple of the rounds.
    {"schedule": "1F1B", "micro_batches": "one"},
    {"schedule": "DualPipeV", "micro_batches": "one"},
    {"schedule": "Interleaved1F1B", "micro_batches": "uneven"},
    {"schedule": "InterleavedZeroBubble", "micro_batches": "uneven"},
    # Process groups send contiguous tensors alone.
    {"passed": "transposed"},
)
"""Options that torch refuses together, and says so; any other refusal is a fault."""
SUSPECTS: tuple[Options, ...] = (
    # findings/pipeline_steps_add_up_wrongly.py
    {"calls": "step+step", "scale_grads": True},
    # findings/pipeline_evaluation_scales_gradients.py
    *({"calls": calls, "scale_grads": True} for calls in _EVALUATED_LATER),
    # findings/pipeline_evaluation_clears_gradients.py
    *(
        {"calls": calls, "scale_grads": False, "second_dim": parallel}
        for calls in _EVALUATED_LATER
        for parallel in ("fsdp", "resharding fsdp")
    ),
    # findings/pipeline_v_schedules_cannot_evaluate.py
    *({"schedule": name, "calls": "eval+step"} for name in _V_SHAPED),
    *({"schedule": name, "calls": calls, "scale_grads": False} for name in _V_SHAPED for calls in _EVALUATED_LATER),
    *({"schedule": name, "loss_fn": "none"} for name in _V_SHAPED),
    # findings/pipeline_changes_buffers_first.py
    *({"stage": "buffer", "metadata": metadata} for metadata in ("inferred", "given on the first rank")),
    # findings/pipeline_hooks_add_up.py
    *({"stage": "hooks", "calls": calls} for calls in _SEVERAL_STEPS),
    {"stage": "hooks", "calls": "step+step", "scale_grads": False},
    # findings/zero_bubble_behind_frozen_stages.py
    *({"schedule": name, "frozen": frozen} for name in _HALVING for frozen in ("first", "all but last")),
    # findings/zero_bubble_calls_no_hooks.py
    *({"schedule": name, "stage": "parameter hooks"} for name in _HALVING),
    # findings/zero_bubble_loses_gradients.py
    *({"schedule": name, "second_dim": "resharding fsdp"} for name in _HALVING),
    # findings/zero_bubble_of_views.py
    *({"schedule": name, "passed": "view"} for name in _HALVING),
    *(
        {"schedule": name, "passed": "input", "second_dim": parallel}
        for name in _HALVING
        for parallel in ("fsdp", "resharding fsdp")
    ),
    *({"schedule": name, "passed": "input", "stage": "checkpointed"} for name in _HALVING),
    # findings/pipeline_receives_overtake.py
    *({"schedule": name, "defer_pp_recv": True} for name in SCHEDULES if "defer_pp_recv" in _parameters(name)),
    # findings/pipeline_examples_must_require_grad.py
    {"metadata": "given without requires_grad"},
    # findings/pipeline_thawed_stage_raises.py
    *({"calls": "step+thaw first+update+step", "frozen": frozen} for frozen in ("first", "all but last")),
    # findings/pipeline_takes_no_dict.py
    {"outputs": "dict"},
    *REFUSALS,
)
"""Options that fail in some version of torch: tried first, since narrowing a row down takes long."""


@experiment(needs=Needs.TRAINING, takes_share=True)
def sweep(rank: RankWorld) -> Swept:
    """Call every schedule with any two values of its options, except refused ones."""
    return sweep_on(_mesh_of(rank), rank.subjects, draw_of(rank, _halves))


def _halves(row: Options) -> list[str]:
    """Return the kind of a row by which a share has every kind of stage under schedules that halve backwards."""
    return [f"{row['stage']}, halved"] if row["schedule"] in _HALVING else []


def sweep_on(mesh: DeviceMesh, subjects: Collection[str], draw: Draw | None = None) -> Swept:
    """Return the outcome on a mesh of pipeline and replicas: of all rows, those that subjects name, or drawn ones."""
    trials = Trials(mesh)
    options = OPTIONS if mesh.ndim > 1 else {**OPTIONS, "second_dim": ("none",)}

    def ended(row: Options) -> Ended:
        found = trials.ended(partial(differences, row))
        if found.end is End.ERROR:
            trials.renew()
        return found

    suspects = [suspect for suspect in SUSPECTS if suspect.get("second_dim", "none") in options["second_dim"]]
    rows = CoveringSweep(options, ended, strength=2, rules=RULES, suspects=suspects, refusals=REFUSALS, draw=draw)
    return rows.swept(subjects)


def _mesh_of(rank: RankWorld) -> DeviceMesh:
    """Return the mesh of a pipeline, and of its data-parallel replicas if it has any."""
    pp = rank.dims.pp
    shape = (pp,) if pp == rank.size else (pp, rank.size // pp)
    return init_device_mesh(rank.device.type, shape)
