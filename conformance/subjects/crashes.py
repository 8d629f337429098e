"""Runs of subjects that did not finish, for their owners: tracebacks without the suite's frames, last collectives."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from conformance.instruments.facts import Collective
from conformance.project import PACKAGE
from conformance.run.ranks.messages import RankReport

_FRAME = re.compile(r'^  File "([^"]+)", line (\d+)')
_OWNERS = (PACKAGE / "subjects" / "shipped",)
"""Directories of the suite whose code is an adapter's."""
_NOTE_BYTES = 240
"""Size of the file with the last collective of a rank, which each collective overwrites."""
_LAST_COLLECTIVE = "collective{}.txt"


class LastCollective:
    """File with the last collective that a rank has issued, which is left if the rank hangs or dies."""

    def __init__(self, directory: Path, *, rank: int) -> None:
        self._file = (directory / _LAST_COLLECTIVE.format(rank)).open("wb", buffering=0)
        self._count = 0

    def note(self, issued: Collective) -> None:
        """Write down a collective in place of the one before."""
        self._count += 1
        text = f"{issued_text(issued)} over {issued.group} in {issued.phase} of step {issued.step} (#{self._count})"
        os.pwrite(self._file.fileno(), text.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES), 0)


def issued_text(issued: Collective) -> str:
    """Return a collective in words: `all_reduce SUM of 64 float32`, `barrier`."""
    of = f" of {issued.numel} {issued.dtype}" if issued.numel and issued.kind != "barrier" else ""
    return f"{issued.kind}{f' {issued.reduce_op}' if issued.reduce_op else ''}{of}"


def last_collectives(directory: Path, *, world_size: int) -> list[str]:
    """Return the last collective that each rank has issued, by rank; empty for a rank that has issued none."""
    files = [directory / _LAST_COLLECTIVE.format(rank) for rank in range(world_size)]
    return [file.read_text(errors="replace").strip() if file.exists() else "" for file in files]


def owners_traceback(report: RankReport) -> str:
    """Return the traceback of a rank that raised, or the stack of one that died, without the frames of the suite."""
    return "\n".join(_kept(report.traceback or _stack(report))).strip("\n")


def owners_place(report: RankReport) -> str:
    """Return the innermost line, `my.py:12`, that is neither the suite's nor an installed package's; empty for none."""
    raised = report.traceback
    frames = [match for line in (raised or _stack(report)).splitlines() if (match := _FRAME.match(line))]
    own = [match for match in frames if not _is_suites(match[1]) and not _is_installed(match[1])]
    if not own:
        return ""
    innermost = own[-1] if raised else own[0]
    return f"{Path(innermost[1]).name}:{innermost[2]}"


def _stack(report: RankReport) -> str:
    """Return the stack of the thread that ran the task: the others, and lists of extension modules, tell nothing."""
    threads = re.split(r"^.*[Tt]hread 0x.*$", report.stack, flags=re.MULTILINE)
    return next((text.strip("\n").partition("\n\n")[0] for text in threads if '  File "' in text), "")


def _kept(text: str) -> Iterator[str]:
    """Yield the lines of a traceback but those of the suite's frames."""
    is_kept = True
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame or not line.startswith("    "):
            is_kept = frame is None or not _is_suites(frame[1])
        if is_kept:
            yield line


def _is_suites(file: str) -> bool:
    return Path(file).is_relative_to(PACKAGE) and not any(Path(file).is_relative_to(owners) for owners in _OWNERS)


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "/lib/python" in file
