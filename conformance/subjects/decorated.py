"""Subjects made of a function `parallelize(model, mesh, config)`; the suite supplies all else. Subjects by name."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

from conformance.importing import companion_of, load_file
from conformance.report.trainer import Ingredient
from conformance.subjects.cells import MESHES, MeshName, Precision, SubjectCell
from conformance.subjects.data import default_count
from conformance.subjects.loop import DataGroup, Loop, SaveOrLoad, Saving
from conformance.subjects.one_process import made_on
from conformance.subjects.packages import versions_of
from conformance.subjects.protocol import Batch, Run, Subject, SubjectMistake

Reduction = Literal["mean", "sum"]
Clip = Callable[[Iterable[nn.Parameter], float], Tensor]
_PARAMETERS = ("model", "mesh", "config")


@dataclass(frozen=True)
class ParallelConfig:
    """Configuration in which `parallelize` is asked to prepare a model."""

    mesh: MeshName
    precision: Precision
    on_meta: bool
    """True if the model is on the meta device; the suite materialises and initialises it afterwards."""
    offload: bool = False
    """True if parameters must be offloaded to the host."""
    pin_memory: bool = False
    """True if offloaded parameters are in pinned memory, for which an accelerator is needed."""

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        """Policy for `fully_shard`: with bf16, compute in bf16 and reduce in fp32."""
        if self.precision == "fp32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Policy for `fully_shard`; host memory is pinned if ranks compute on an accelerator."""
        return CPUOffloadPolicy(pin_memory=self.pin_memory) if self.offload else OffloadPolicy()

    @property
    def policies(self) -> dict[str, Any]:
        """Both policies, as keyword arguments of `fully_shard`."""
        return {"mp_policy": self.mixed_precision, "offload_policy": self.offload_policy}


def configured(cell: SubjectCell) -> ParallelConfig:
    """Return the configuration of a cell."""
    return ParallelConfig(
        cell.mesh,
        cell.precision,
        on_meta=cell.init == "meta",
        offload=cell.offload,
        pin_memory=cell.offload and cell.device != "cpu",
    )


SGD_OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD with momentum, whose updates are as accurate as gradients."""
    return SGD(parameters, **SGD_OPTIONS)


def clip_with_torch(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip gradients with `torch.nn.utils.clip_grad_norm_`; returns their norm before, a scalar.

    Raises SubjectMistake, with advice, for gradients on several meshes, which torch refuses.
    """
    try:
        return clip_grad_norm_(parameters, max_norm)
    except RuntimeError as error:
        if "same mesh" not in str(error):
            raise
        raise SubjectMistake(
            f"torch.nn.utils.clip_grad_norm_ refuses gradients on several meshes ({str(error).splitlines()[0]}): "
            "declare clip=, the function of parameters and a limit by which you clip"
        ) from error


@dataclass(frozen=True)
class FunctionSubject:
    """Subject whose parallelisation is one function, see `protocol.Subject`."""

    function: Callable[..., Any]
    make_model: Callable[[], nn.Module]
    make_tied_model: Callable[[], nn.Module] | None
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[torch.Generator], Batch]
    count: Callable[[Batch], float]
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    clip: Clip
    initialize: Callable[[nn.Module], object] | None
    meshes: Sequence[MeshName]
    precisions: Sequence[Precision]
    mesh_names: Mapping[str, str]
    reduction: Reduction
    offloads: bool
    saving: Saving | None
    shims: Sequence[str] = field(default=())

    @property
    def name(self) -> str:
        """Name of the function, with its module."""
        return f"{self.function.__module__}:{self.function.__name__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, as if it were not decorated."""
        return self.function(*args, **kwargs)

    def versions(self) -> Mapping[str, str]:
        """Return the versions of torch and of the packages that the functions name."""
        return versions_of((self.function, self.make_model, self.loss, self.make_optimizer, self.clip))

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the declaration that a cell needs and the decorator lacks, or None."""
        if cell.mesh not in self.meshes:
            return f"this subject does not declare meshes=[..., {cell.mesh!r}]"
        if cell.precision not in self.precisions:
            return f"this subject does not declare precisions=[..., {cell.precision!r}]"
        if cell.init == "meta" and self.initialize is None:
            return "this subject does not declare initialize=, a function that initialises a materialised model"
        if cell.tied and self.make_tied_model is None:
            return "this subject does not declare tied_model=, a function that makes the model with tied weights"
        if cell.offload and not self.offloads:
            return "this subject does not declare offload=True"
        if cell.resumed and self.saving is None:
            return "this subject does not declare save= and load="
        return None

    def model(self, *, tied: bool) -> nn.Module:
        """Return the user's model."""
        model = self.make_tied_model() if tied and self.make_tied_model else self.make_model()
        if not isinstance(model, nn.Module):
            raise SubjectMistake(f"model= returned a {type(model).__name__}: give a function that returns an nn.Module")
        return model

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> Run:
        """Make the model, and give it to the function; on the meta device, materialise it afterwards."""
        mesh = self._mesh(cell, device)
        config = configured(cell)
        model = made_on(device, partial(self.model, tied=cell.tied), on_meta=config.on_meta)
        model, optimizer = _unpacked(self.function(model, mesh, config), model)
        if config.on_meta:
            self._materialize(model, device)
        return Loop(
            model=model,
            optimizer=optimizer or self.make_optimizer(model.parameters()),
            loss=self.loss,
            count=self.count,
            clip=lambda parameters: self.clip(parameters, max_norm),
            data=_data_group(mesh, cell),
            averaged=self.reduction == "mean",
            device=device,
            saving=self.saving,
            replaced=self._replaced(has_optimizer=optimizer is not None),
        )

    def _replaced(self, *, has_optimizer: bool) -> list[Ingredient]:
        """Return the ingredients of a step that are the suite's defaults."""
        is_default: dict[Ingredient, bool] = {
            "clip": self.clip is clip_with_torch,
            "optimizer": self.make_optimizer is sgd and not has_optimizer,
        }
        return [name for name, is_suites in is_default.items() if is_suites]

    def _materialize(self, model: nn.Module, device: torch.device) -> None:
        """Materialise and initialise the model, unless the function has done so."""
        if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
            model.to_empty(device=device)
        if self.initialize is not None:
            self.initialize(model)

    def _mesh(self, cell: SubjectCell, device: torch.device) -> DeviceMesh:
        names = tuple(self.mesh_names.get(name, name) for name in cell.shape)
        return init_device_mesh(device.type, tuple(cell.shape.values()), mesh_dim_names=names)


def subject(
    *,
    model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Batch], Tensor],
    batch: Callable[[torch.Generator], Batch],
    count: Callable[[Batch], float] = default_count,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd,
    clip: Clip = clip_with_torch,
    initialize: Callable[[nn.Module], object] | None = None,
    meshes: Sequence[MeshName] = ("dp2",),
    precisions: Sequence[Precision] = ("fp32",),
    mesh_names: Mapping[str, str] | None = None,
    reduction: Reduction = "mean",
    tied_model: Callable[[], nn.Module] | None = None,
    offload: bool = False,
    save: SaveOrLoad | None = None,
    load: SaveOrLoad | None = None,
) -> Callable[[Callable[..., Any]], FunctionSubject]:
    """Make a subject of `parallelize(model, mesh, config)`, for `conformance judge MODULE:FUNCTION`.

    The function shards the model over the mesh, as `config` (`ParallelConfig`) says, and returns it, or nothing if it
    changes the model in place. If the trainer makes its optimizer itself, the function returns model and optimizer.

    Args:
        model: makes the model that one process trains, in fp32 and without dropout; a class will do.
        loss: function of model and batch that returns the sum of the losses of samples or tokens, a scalar.
        batch: function of a `torch.Generator` that returns a micro-batch: a tensor, or a dict, list or tuple of
            tensors, whose dimension 0 is the samples.
        count: number by which a batch counts in the mean; by default its labels other than -100, or its samples: labels
            are the integers below the key `labels`, or those of the second of two tensors.
        optimizer: makes the optimizer of parameters. The reference uses it, too.
        clip: function of parameters and a limit that clips gradients and returns their norm before.
        initialize: initialises a materialised model; declares that the function takes a model on the meta device.
        meshes: those that the function can handle, of `dp2`, `hsdp2x2` and `dp2-tp2`.
        precisions: those that the function can handle, of `fp32` and `bf16`.
        mesh_names: names of mesh dimensions, by the suite's: `dp_replicate`, `dp_shard`, `tp`.
        reduction: what happens to gradients of data-parallel ranks: `mean` (the default of FSDP2) or `sum`.
        tied_model: makes the model with its embedding and its head as one parameter.
        offload: True declares that the function gives `config.offload_policy` to `fully_shard`.
        save: function of the parallel model, its optimizer and a directory that saves both, called on all ranks.
        load: function of the same that loads into a model and an optimizer that were made again.

    Raises SubjectMistake, a UsageError, for arguments that cannot be used.
    """
    require_declarable(meshes=meshes, precisions=precisions, model=model, loss=loss, batch=batch, count=count)
    if (save is None) != (load is None):
        raise SubjectMistake("save= without load=, or load= without save=: give both, or neither")
    if reduction not in ("mean", "sum"):
        raise SubjectMistake(f"reduction={reduction!r}: give 'mean' or 'sum'")

    def declare(function: Callable[..., Any]) -> FunctionSubject:
        _require_signature(function)
        return FunctionSubject(
            function=function,
            make_model=model,
            make_tied_model=tied_model,
            loss=loss,
            batch=batch,
            count=count,
            make_optimizer=optimizer,
            clip=clip,
            initialize=initialize,
            meshes=tuple(meshes),
            precisions=tuple(precisions),
            mesh_names=mesh_names or {},
            reduction=reduction,
            offloads=offload,
            saving=Saving(save, load) if save and load else None,
        )

    return declare


def require_declarable(
    *, meshes: Sequence[MeshName], precisions: Sequence[Precision], **functions: Callable[..., object]
) -> None:
    """Raise SubjectMistake for meshes or precisions that the suite does not know, and for functions that are none."""
    for name, value, allowed in (("meshes", meshes, MESHES), ("precisions", precisions, ("fp32", "bf16"))):
        unknown = [value] if isinstance(value, str) else [entry for entry in value if entry not in allowed]
        if unknown:
            raise SubjectMistake(f"{name}={value!r}: give a list of {', '.join(map(repr, allowed))}")
    for name, function in functions.items():
        if not callable(function):
            raise SubjectMistake(f"{name}= is a {type(function).__name__}: give a function")


def _require_signature(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*_PARAMETERS)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        own = f"{name}({', '.join(signature.parameters)})"
        raise SubjectMistake(f"{own} cannot be called with ({', '.join(_PARAMETERS)}): {error}") from None


def _unpacked(returned: Any, model: nn.Module) -> tuple[nn.Module, Optimizer | None]:
    """Return model and optimizer from the value that the function returned."""
    match returned:
        case None:
            return model, None
        case nn.Module():
            return returned, None
        case (nn.Module() as parallel, Optimizer() as optimizer):
            return parallel, optimizer
    raise SubjectMistake(
        f"parallelize returned a {type(returned).__name__}: return the model, nothing, or (model, optimizer)"
    )


def _data_group(mesh: DeviceMesh, cell: SubjectCell) -> DataGroup:
    """Return the place of this rank among those that see different data."""
    rank = 0
    for index, (name, size) in enumerate(cell.shape.items()):
        if name != "tp":
            rank = rank * size + mesh.get_local_rank(index)
    return DataGroup(rank=rank, ranks=cell.data_ranks, copies=cell.world_size // cell.data_ranks)


_NEEDED = ("versions", "unsupported", "model", "batch", "loss", "count", "make_optimizer", "build")


def load_subject(name: str) -> Subject:
    """Import the module of a subject and return the subject; a class is called without arguments.

    Raises SubjectMistake, with what is allowed, for a name that leads to no subject. What the module itself raises
    when it is imported is passed on.
    """
    origin, _, attribute = name.partition(":")
    module = _file(Path(origin)) if origin.endswith(".py") else _module(origin, name)
    found = getattr(module, attribute, None)
    if found is None:
        subjects = [key for key, value in vars(module).items() if _is_subject(value)]
        known = f"; subjects there: {', '.join(subjects)}" if subjects else ""
        raise SubjectMistake(f"{origin} has no `{attribute}`{known}")
    if isinstance(found, type) and _lacks(found) != list(_NEEDED):
        found = found()
    missing = _lacks(found)
    if not missing:
        subject: Subject = found
        return subject
    companion = companion_of(Path(origin))
    if origin.endswith(".py") and companion.is_file():
        return load_subject(f"{companion}:train")
    if len(missing) < len(_NEEDED):
        raise SubjectMistake(f"{name} is no subject: it lacks {', '.join(missing)}")
    loop = f", which conformance judge --init --loop {name} writes" if origin.endswith(".py") else ""
    raise SubjectMistake(
        f"{name} is no subject: decorate parallelize(model, mesh, config) with conformance.subjects.subject(...), or "
        f"declare how your own loop trains with conformance.subjects.own_loop(...){loop}"
    )


def _is_subject(found: object) -> bool:
    return not isinstance(found, type) and not _lacks(found)


def _lacks(found: object) -> list[str]:
    """Return the methods of a subject that an object lacks, or a class."""
    return [needed for needed in _NEEDED if not callable(getattr(found, needed, None))]


def _module(origin: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(origin)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{origin}.".startswith(f"{error.name}."):
            raise
        raise SubjectMistake(
            f"no module `{error.name}` for {name}: run in its directory, install its package, or give FILE.py:NAME"
        ) from None


def _file(file: Path) -> ModuleType:
    if not file.is_file():
        raise SubjectMistake(f"no file {file}")
    return load_file(file, with_neighbours=True)
