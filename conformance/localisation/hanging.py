"""Place at which the ranks of a run that hangs wait for each other, told from the stacks that the run has left."""

import linecache
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from conformance.instruments.taps import is_foreign, readable_path
from conformance.localisation.ranks import Ranks
from conformance.outcomes import Failure
from conformance.project import PACKAGE, PROJECT
from conformance.report.location import Code, Location

_RANK = re.compile(r"^--- rank (\d+) ", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+),? in (\S+)', re.MULTILINE)
_THREAD = re.compile(r"^.*[Tt]hread 0x.*$", re.MULTILINE)
_ISSUERS = ("distributed_c10d.py", "_functional_collectives.py")


class Waiting(NamedTuple):
    """Rank that waits in a collective."""

    rank: int
    collective: str
    """Function of `torch.distributed`; empty if the rank waits in none."""
    issued: str
    """Last collective that the rank has issued, such as `all_reduce SUM of 64 float32 over world`; empty if unknown."""
    code: Code | None
    """Line of the trainer that waits."""
    text: str
    """Source of that line."""

    @property
    def clause(self) -> str:
        """Rank, collective and line in words."""
        where = f" at {self.code.file}:{self.code.line}, `{self.text}`" if self.code else ""
        if self.code is None and not self.issued:
            return f"rank {self.rank} waits for the others in the suite's own code"
        waits = f"waits in {self.collective}" if self.collective else "waits in no collective"
        if self.issued and self.collective:
            waits = f"waits in {self.issued.partition(' in ')[0]}"
        elif self.issued:
            where += f", after {self.issued}"
        return f"rank {self.rank} {waits}{where}"


def place_of_hang(failure: Failure, ranks: Ranks) -> Location | None:
    """Return the collectives in which ranks wait; the ranks that wait where fewest others do are told first.

    None if the ranks have left no stacks.
    """
    waiting = waiting_ranks(failure)
    if not waiting:
        return None
    places = Counter((each.collective, each.code) for each in waiting)
    waiting.sort(key=lambda each: (places[each.collective, each.code], each.rank))
    first = waiting[0]
    alike = [each.rank for each in waiting if (each.collective, each.code) == (first.collective, first.code)]
    told = {(each.collective, each.code): each for each in reversed(waiting)}
    return ranks.location(
        alike,
        family="schedule",
        stage="schedule",
        name="",
        quantity=f"{first.collective or 'computation'} in which ranks wait",
        equals="; ".join(each.clause for each in sorted(told.values(), key=waiting.index)),
        called=first.code,
    )


def waiting_ranks(failure: Failure) -> list[Waiting]:
    """Return where each rank of a failed run was that has left a stack or a traceback."""
    starts, details = [*_RANK.finditer(failure.details)], failure.details
    ends = [*(start.start() for start in starts), len(details)][1:]
    frames = {
        int(start[1]): _frames(details[start.end() : end]) for start, end in zip(starts, ends, strict=bool(starts))
    }
    return [_waiting(rank, found, failure) for rank, found in frames.items() if found]


def _frames(text: str) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame of a rank's section, the innermost first; of its first thread."""
    is_traceback = "Traceback (most recent call last)" in text
    if not is_traceback:
        text = "".join(_THREAD.split(text)[:2])
    frames = [(file, int(line), function) for file, line, function in _FRAME.findall(text)]
    return frames[::-1] if is_traceback else frames


def _waiting(rank: int, frames: Sequence[tuple[str, int, str]], failure: Failure) -> Waiting:
    issued = [function for file, _, function in frames if file.endswith(_ISSUERS)]
    own = next((frame for frame in frames if not is_foreign(frame[0]) and not is_suites_loop(frame[0])), None)
    last = failure.collectives[rank] if rank < len(failure.collectives) else ""
    code, text = None, ""
    if own is not None:
        file, line, function = own
        code = Code(file=readable_path(file), line=line, function=function)
        text = linecache.getline(file, line).strip()
    return Waiting(rank, issued[0] if issued else "", last, code, text)


def is_suites_loop(file: str) -> bool:
    """Return whether a file, as `readable_path` returns it or not, is of the suite's part that runs other trainers."""
    path = PROJECT / file
    return path.is_relative_to(PACKAGE / "subjects") and not path.is_relative_to(PACKAGE / "subjects" / "shipped")
