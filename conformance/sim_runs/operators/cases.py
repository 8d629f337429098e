"""Cases of the sweep: one operator, dtype and variant with all samples, on the device and on the CPU."""

import warnings
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from conformance.sim import device
from conformance.sim_runs.operators import database
from conformance.sim_runs.operators.comparing import Snapshot, difference, reason, snapshots
from conformance.sim_runs.operators.samples import placed
from conformance.sim_runs.operators.variants import VARIANTS, NotApplicable

_CPU = torch.device("cpu")
_RESIZED = "An output with one or more elements was resized"
DTYPES = ("float32", "bfloat16", "float16", "complex64", "int64", "bool")
"""Dtypes of the sweep, by default."""
THOROUGH = "float32"
"""Dtype in which all variants are called; in the others those of `_IN_EACH_DTYPE`."""
_IN_EACH_DTYPE = ("function", "in place", "out")


class Outcome(StrEnum):
    """Outcome of a case; the worst among its samples, in ascending order."""

    EQUAL = "equal"
    """Results agree in every bit, or both devices raise an error."""
    REFUSED = "refused"
    """An error on the device, none on the CPU."""
    DIFFERS = "differs"
    DIED = "died"
    """The process ended, or did not answer."""


class Case(NamedTuple):
    """One operator, dtype and variant."""

    operator: str
    dtype: str
    variant: str


class Judged(NamedTuple):
    """Outcome of a case."""

    outcome: Outcome
    reason: str = ""
    """Difference, error or signal of the first sample with this outcome."""
    samples: int = 0
    """Samples that gave results on the CPU or the device; 0 if the variant does not exist."""


def cases(names: list[str], dtypes: list[str]) -> list[Case]:
    """Return the cases of operators, in order, for the dtypes that they have on the CPU."""
    operators = database.operators()
    return [
        Case(name, str(dtype).removeprefix("torch."), variant)
        for name in names
        for dtype in database.dtypes(dtypes)
        if operators[name].supports_dtype(dtype, "cpu")
        for variant in (VARIANTS if str(dtype) == f"torch.{THOROUGH}" else _IN_EACH_DTYPE)
    ]


def judged(case: Case) -> Judged:
    """Return the outcome of a case. The process must have the device, see `conformance.sim.enabling`."""
    (dtype,) = database.dtypes([case.dtype])
    worst, compared = Judged(Outcome.EQUAL), 0
    for sample in database.samples(database.operators()[case.operator], dtype):
        found = _judged_sample(case, sample)
        if found is None:
            continue
        compared += found.samples
        if list(Outcome).index(found.outcome) > list(Outcome).index(worst.outcome):
            worst = found
    return worst._replace(samples=compared)


def _judged_sample(case: Case, sample: Any) -> Judged | None:
    try:
        expected: list[Snapshot] | Exception = _run(case, sample, _CPU)
    except NotApplicable:
        return None
    except (AttributeError, NameError):  # a mistake in the variant, not the operator's
        raise
    except Exception as error:
        expected = error
    try:
        measured = _run(case, sample, device.device())
        torch.accelerator.synchronize()
    except NotApplicable:
        return Judged(Outcome.DIFFERS, "the result is no view of the input", 1)
    except Exception as error:
        _finish_queued_work()
        return Judged(Outcome.EQUAL) if isinstance(expected, Exception) else Judged(Outcome.REFUSED, reason(error), 1)
    if isinstance(expected, Exception):
        return Judged(Outcome.DIFFERS, f"no error; on the CPU {reason(expected)}", 1)
    found = difference(measured, expected)
    return Judged(Outcome.DIFFERS if found else Outcome.EQUAL, found, 1)


def run_on_cpu(case: Case) -> None:
    """Call all samples of a case on the CPU alone, whose kernel may end the process."""
    (dtype,) = database.dtypes([case.dtype])
    for sample in database.samples(database.operators()[case.operator], dtype):
        with suppress(Exception):
            _run(case, sample, _CPU)


def _finish_queued_work() -> None:
    """Run kernels that are queued behind one that failed, so that no later sample meets their errors."""
    while True:
        try:
            return torch.accelerator.synchronize()
        except RuntimeError:
            continue


def _run(case: Case, sample: Any, where: torch.device) -> list[Snapshot]:
    own = placed(sample, where)
    database.seed()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = VARIANTS[case.variant](database.operators()[case.operator], own)
    resized = sum(str(warning.message).startswith(_RESIZED) for warning in caught)
    return [*snapshots(case.operator, results), *snapshots("", resized)]
