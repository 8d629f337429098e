"""Interfaces of DTensor and of parallel styles as covering arrays: values for each parameter, and what to compare.

Parameters are read from the signature of the installed torch: a switch that a version adds is tried without a change
here, one that it lacks is left out, and any other parameter without values is an error.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from conformance.covering_arrays.combinations import Rule
from conformance.experiments.context import RankWorld
from conformance.sweeps.covering_sweep import CoveringSweep, Options, named
from conformance.sweeps.drawing import draw_of
from conformance.sweeps.layouts import Layout
from conformance.sweeps.refusals import refused_on
from conformance.sweeps.trials import Swept, Trials, select_samples
from reference_trainer.checks import UsageError

OMITTED = "omitted"
"""Value of a parameter that a call leaves out."""
PLACEMENTS: Mapping[str, Placement] = {
    "R": Replicate(),
    "S0": Shard(0),
    "S1": Shard(1),
    "S-1": Shard(-1),
    "P": Partial(),
}
"""Placements by the names that options have."""
DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int64": torch.int64,
}
"""Dtypes by the names that options have."""
SIZES = ("even", "uneven", "few")
"""Sizes of tensors: shards are equal, or of different sizes, or some ranks have none."""

Faults = Iterator[tuple[str, str]]
"""Faults of a call on this rank, each with a text."""


@dataclass(frozen=True)
class Interface:
    """Function or class of torch, values for its parameters, and a comparison of calls with full tensors."""

    name: str
    function: Callable[..., Any]
    values: Mapping[str, tuple[Any, ...]]
    """Values of parameters by name, the default first; parameters that every call gives are in `given`."""
    faults: Callable[[Options, DeviceMesh], Faults]
    """Function that calls the interface with options, on all ranks, and yields the faults."""
    given: tuple[str, ...] = ()
    """Parameters that every call gives in the same way, or leaves out because they concern no CPU or strided tensor."""
    conditions: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Options that are no parameters, such as the layout of a tensor that is redistributed."""
    rules: Sequence[Rule] = ()

    @property
    def options(self) -> Mapping[str, tuple[Any, ...]]:
        """Values of all conditions and of the parameters that the installed torch has.

        Raises UsageError for a parameter without values.
        """
        parameters = {
            name: each for name, each in inspect.signature(self.function).parameters.items() if name != "self"
        }
        options = {name: values for name, values in self.values.items() if name in parameters}
        for name, parameter in parameters.items():
            if isinstance(parameter.default, bool):
                options.setdefault(name, (parameter.default, not parameter.default))
            elif name not in options and name not in self.given:
                raise UsageError(f"{self.name}: give values for its parameter {name}")
        return {**self.conditions, **options}


def swept_interfaces(interfaces: Iterable[Interface], rank: RankWorld, trials: Trials, *, strength: int) -> Swept:
    """Try any `strength` options of each interface together, on the mesh of the trials."""
    total, refused, draw = Swept(), refused_on(torch.__version__), draw_of(rank)
    for interface in select_samples(interfaces, lambda each: each.name, restricted_to=_names(rank.subjects)):

        def ended(options: Options, interface: Interface = interface) -> Any:
            return trials.ended(lambda mesh: dict(interface.faults(options, mesh)))

        known = named(refused, interface.options, interface.name)
        sweep = CoveringSweep(
            interface.options, ended, interface.name, strength, interface.rules, known=known, draw=draw
        )
        total.add(sweep.swept(rank.subjects))
    return total


def _names(subjects: Iterable[str]) -> set[str]:
    """Return the names of interfaces in subjects, which may spell options, too."""
    return {subject.partition("(")[0] for subject in subjects}


def layouts(ndim: int, names: Iterable[str]) -> tuple[str, ...]:
    """Return the layouts of a mesh of one or two dimensions as text, such as `S0` or `P,S0`."""
    every = list(names)
    return tuple(every if ndim == 1 else (f"{one},{other}" for one in every for other in every))


def layout_of(text: str) -> Layout:
    """Return the layout that a text spells."""
    return tuple(PLACEMENTS[name] for name in text.split(","))


def shape_of(size: str, mesh: DeviceMesh, more: int = 0) -> tuple[int, int]:
    """Return the shape of a matrix of a size; `more` gives others of the same kind."""
    ranks = mesh.size()
    if size == "even":
        return (2 + 2 * more) * ranks, 2 * ranks
    return (2 * ranks + 1 + 2 * more, 2 * ranks - 1) if size == "uneven" else (max(1, ranks - 1), 1 + more)
