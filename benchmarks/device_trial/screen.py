"""Results of a call: one screen of values, laws and failures, and a few files that come back from a lent machine."""

import collections
import json
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.device_trial.stages import Outcome

LINES, COLUMNS = 60, 190
_SHOWN_FAILURES = 4
_BAD = ("fail", "error", "crash", "timeout", "unexpected-pass")


def screen(outcomes: Sequence[Outcome], *, left_s: float) -> str:
    """Return at most `LINES` lines, which end with the number of values that did not fit."""
    cases = [case for outcome in outcomes for case in _cases(outcome)]
    head = [_stage_line(outcome) for outcome in outcomes]
    tail = [*_laws(cases), *_failures(cases), f"{left_s:.0f} s left"]
    values = [f"  {name}: {value}" for outcome in outcomes for name, value in outcome.values.items()]
    room = LINES - len(head) - len(tail)
    if len(values) > room:
        values = [*values[: room - 1], f"  and {len(values) - room + 1} more values in outcomes.json"]
    return "\n".join(line[:COLUMNS] for line in [*head, *values, *tail])


def _stage_line(outcome: Outcome) -> str:
    return f"{outcome.name:<36} {outcome.seconds:>6.1f} s  {outcome.state}"


def _cases(outcome: Outcome) -> list[dict[str, Any]]:
    file = Path(outcome.report, "report.json")
    if not outcome.report or not file.exists():
        return []
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return [case | {"stage": outcome.name} for case in cases]


def _laws(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield one line for each substrate and verdict: the laws, with their numbers of cases."""
    counts = collections.Counter((case["substrate"], case["verdict"], case["law"]) for case in cases)
    by_verdict: dict[tuple[str, str], list[str]] = {}
    for (substrate, verdict, law), number in sorted(counts.items()):
        by_verdict.setdefault((substrate, verdict), []).append(law if number == 1 else f"{law} x{number}")
    for (substrate, verdict), laws in by_verdict.items():
        if verdict != "not-run":
            yield f"{substrate} {verdict}: {', '.join(laws)}"


def _failures(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    bad = [case for case in cases if case["verdict"] in _BAD and not case["stage"].startswith("race-")]
    for case in bad[:_SHOWN_FAILURES]:
        yield f"{case['verdict']} {case['id']}: {(case['reason'] or '').splitlines()[0]}"
    if len(bad) > _SHOWN_FAILURES:
        yield f"and {len(bad) - _SHOWN_FAILURES} more"


MAX_FILE_BYTES = 16 << 20
_LEFT_OUT = (".safetensors", ".html", ".lock", ".part")
_NAMES = ("screen.txt", "outcomes.json", "recipe.json")


def pack(work: Path, out: Path, *, call: str) -> list[Path]:
    """Put results into `out`: the screen, the outcomes, the recipe, logs, reports, and the allocator's history.

    Six files at most, each of at most `MAX_FILE_BYTES`; an archive that would be larger is cut into none, and the
    screen says so. Returns the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [_copy(work / name, out / f"{call}-{name}") for name in _NAMES if (work / name).exists()]
    archives = {
        "logs": [*sorted(work.glob("*.log")), *work.glob("fidelity.json")],
        "reports": [file for file in sorted(work.rglob("*")) if _belongs_to_report(file, work)],
        "allocator": sorted(work.glob("allocator_history.pickle")),
    }
    for name, members in archives.items():
        if members:
            files += _archive(out / f"{call}-{name}.tgz", members, work)
    return files


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copyfile(source, target))


def _belongs_to_report(file: Path, work: Path) -> bool:
    """Return whether a file lies in a report's directory and says something that is not in another one."""
    return file.is_file() and file.parent != work and file.suffix not in _LEFT_OUT and file.name != "lock"


def _archive(file: Path, members: list[Path], work: Path) -> list[Path]:
    with tarfile.open(file, "w:gz") as archive:
        for member in members:
            archive.add(member, member.relative_to(work))
    if file.stat().st_size <= MAX_FILE_BYTES:
        return [file]
    note = file.with_suffix(".too-large.txt")
    note.write_text(f"{file.stat().st_size} bytes, more than {MAX_FILE_BYTES}\n")
    file.unlink()
    return [note]
