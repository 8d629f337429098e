"""Place at which the ranks of a run that hangs wait for each other, told from the stacks that the run has left."""

import linecache
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from conformance.instruments.taps import is_foreign, readable_path
from conformance.localisation.ranks import Ranks
from conformance.outcomes import Failure
from conformance.report.location import Code, Location

_RANK = re.compile(r"^--- rank (\d+) hung", re.MULTILINE)
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+) in (\S+)', re.MULTILINE)
_ISSUER = "distributed_c10d.py"


class Waiting(NamedTuple):
    """Rank that waits in a collective."""

    rank: int
    collective: str
    """Function of `torch.distributed`; empty if the rank waits in none."""
    code: Code | None
    """Line of the trainer that waits."""
    text: str
    """Source of that line."""

    @property
    def clause(self) -> str:
        """Rank, collective and line in words."""
        where = f" at {self.code.file}:{self.code.line}, `{self.text}`" if self.code else ""
        return f"rank {self.rank} waits in {self.collective or 'no collective'}{where}"


def place_of_hang(failure: Failure, ranks: Ranks) -> Location | None:
    """Return the collectives in which ranks wait; the ranks that wait where fewest others do are told first.

    None if the ranks have left no stacks.
    """
    waiting = list(_waiting(failure.details))
    if not waiting:
        return None
    places = Counter((each.collective, each.code) for each in waiting)
    waiting.sort(key=lambda each: (places[each.collective, each.code], each.rank))
    first = waiting[0]
    alike = [each.rank for each in waiting if (each.collective, each.code) == (first.collective, first.code)]
    told = {(each.collective, each.code): each for each in reversed(waiting)}
    return Location(
        case="",
        cell="",
        family="schedule",
        stage="schedule",
        name="",
        quantity=f"{first.collective or 'computation'} in which ranks wait",
        ranks=alike,
        ranks_text=ranks.text(alike),
        equals="; ".join(each.clause for each in sorted(told.values(), key=waiting.index)),
        called=first.code,
    )


def _waiting(details: str) -> Iterator[Waiting]:
    """Yield the ranks of a report on a failed run, with the innermost frames of each."""
    starts = [*_RANK.finditer(details)]
    for number, start in enumerate(starts):
        end = starts[number + 1].start() if number + 1 < len(starts) else len(details)
        frames = _FRAME.findall(details[start.end() : end])
        issued = [function for file, _, function in frames if file.endswith(_ISSUER)]
        own = next(((file, int(line), function) for file, line, function in frames if not is_foreign(file)), None)
        code, text = None, ""
        if own is not None:
            file, line, function = own
            code = Code(file=readable_path(file), line=line, function=function)
            text = linecache.getline(str(Path(file)), line).strip()
        yield Waiting(int(start[1]), issued[0] if issued else "", code, text)
