"""Stages of the two calls, the most informative first.

The first probes the device's kernels, forks and communication, and judges the laws that rest on them. The second takes
the rest: four ranks, races, and as many cases of the profile `pr` as there is time for.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.device_trial.stages import Stage
from conformance.defects.catalogue import defects

CALLS = ("first", "second")
TOTAL_S = {"first": 150.0, "second": 540.0}
FIDELITY_FILE = "fidelity.json"
PACKAGE = __package__ or "benchmarks.device_trial"
RACES = ("all-reduce-buffer-released", "offload-copy-not-awaited", "offload-source-released")
"""Defects that the simulated device shows; a device must show them, too, or it contradicts the model."""
_PLAIN = "dp2-fp32-default-meta"
_TWO_RANKS = (_PLAIN, "dp2-bf16mp-default-meta", "dp2-fp32-default-meta-integer-sgd-noclip-steps1")
_FOUR_RANKS = ("dp2-tp2-fp32-default-meta", "hsdp2x2-fp32-default-meta", "dp2-fp32-default-meta-offloadcpu")
_DEEP = "dp2-fp32-default-meta-deep"
_PINNED_REPLICAS = "hsdp2x2-fp32-default-meta-offloadcpu-pinned"


def stages_of(call: str, *, accelerator: str, work: Path) -> list[Stage]:
    """Return the stages of a call on `cuda`, or of its dry run on `cpu` or `sim`."""
    program = _Program(accelerator, work)
    return list(program.first() if call == "first" else program.second())


_FIRST_CELL = re.compile(r"[\w.]+(?:-[\w.]+)+")
"""Ids of cells in a selection, the reference trainer's first."""


class _Program:
    def __init__(self, accelerator: str, work: Path) -> None:
        self._accelerator, self._work = accelerator, work
        self._device = "cuda" if accelerator == "cuda" else "cpu"

    def first(self) -> Iterator[Stage]:
        yield self._probe("machine", 30, self._device)
        yield self._probe("kernels", 45, self._device, needs=["machine"])
        yield self._probe("forks", 60, self._device, needs=["machine"])
        yield self._probe("communication", 90, self._device, str(recipe_file(self._work)), needs=["machine"])
        if self._accelerator == "cuda":
            history = [sys.executable, "-m", "benchmarks.allocator_history", "record"]
            command = [*history, str(self._work / "allocator_history.pickle")]
            yield Stage("allocator", command, 40, needs=["machine"])
        if self._accelerator != "cpu":  # it has neither streams nor an allocator of its own
            yield self._probe("fidelity", 45, self._accelerator, str(self._work / FIDELITY_FILE), needs=["machine"])
        ranks = ["forks", "communication"]
        laws = ["ENV-*", "PAR-1", "PAR-2", "PAR-5", "PAR-9"]
        yield self._session("two-ranks", 90, laws, _TWO_RANKS, needs=["kernels", *ranks])
        yield self._probe("memory", 60, self._accelerator, "dp2", needs=ranks)
        yield self._session("streams", 60, ["MEM-10", "STREAM-2"], [_DEEP], needs=ranks, may_be_empty=True)

    def second(self) -> Iterator[Stage]:
        yield self._session("four-ranks", 120, ["PAR-*", "MP-*", "CLIP-*", "OFF-*"], _FOUR_RANKS)
        cells = {defect.id: _FIRST_CELL.findall(defect.cells)[0] for defect in defects() if defect.id in RACES}
        for race in RACES:
            expected = (0, 5) if self._accelerator == "cpu" else (1,)  # the CPU has no streams, nor pinned memory
            yield self._session(f"race-{race}", 40, ["STREAM-5"], [cells[race]], defect=race, expected=expected)
        trainer = "conformance.subjects.shipped.reference:ReferenceTrainer"
        yield self._session("judge", 90, None, None, trainer=trainer)
        yield self._session("pinned-replicas", 40, ["STREAM-5", "OFF-1"], [_PINNED_REPLICAS], may_be_empty=True)
        yield self._session("pr", float("inf"), None, None, profile="pr", fills_the_rest=True)

    def _probe(self, name: str, limit_s: float, *arguments: str, needs: Sequence[str] = ()) -> Stage:
        return Stage(name, [sys.executable, "-m", f"{PACKAGE}.{name}", *arguments], limit_s, needs)

    def _session(
        self,
        name: str,
        limit_s: float,
        laws: Sequence[str] | None,
        cells: Sequence[str] | None,
        *,
        profile: str = "nightly",
        defect: str | None = None,
        trainer: str | None = None,
        needs: Sequence[str] = (),
        expected: Sequence[int] = (0,),
        may_be_empty: bool = False,
        fills_the_rest: bool = False,
    ) -> Stage:
        """Return a session with a separate report, without plugins other than the suite's and xdist's.

        A single cell need not be in the matrix. A trainer is judged as other people's are.
        """
        report = self._work / name
        selected = cells[0] if cells and len(cells) == 1 else f"id in ({', '.join(cells or ())})"
        command = [
            *(sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "conformance.pytest_plugin.plugin"),
            *("-n0", "-q", "-p", "no:cacheprovider", "--shrink", "0", "--explain", "0"),
            *(("conformance/laws/trainers", "--subject", trainer, "--fast") if trainer else ("conformance/",)),
            *("--accelerator", self._accelerator, "--report-dir", str(report)),
            *(() if trainer else ("--profile", profile)),
            *(("--laws", ",".join(laws)) if laws else ()),
            *(("--cells", selected) if cells else ()),
            *(("--defect", defect) if defect else ()),
        ]
        expected = (*expected, 5) if may_be_empty and self._accelerator == "cpu" else expected
        return Stage(name, command, limit_s, needs, expected, report, fills_the_rest)


def recipe_file(work: Path) -> Path:
    """Return the file with the variables that make NCCL work."""
    return work / "recipe.json"
