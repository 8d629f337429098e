"""Counts of the coverage of torch: branches, functions, parameters and pairs of parameters, seen and possible."""

import linecache
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations

import msgspec

from conformance.plan.coverage import Tally
from conformance.torch_coverage.areas import AREAS, torch_directory
from conformance.torch_coverage.branches import functions
from conformance.torch_coverage.reasons import Reason, Target, left_on_purpose
from conformance.torch_coverage.seen import Seen

TOTAL = "all"


class AreaCoverage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coverage of an area of torch; targets left on purpose count as not possible."""

    branches: Tally
    functions: Tally
    """Functions that were called, of all that have code."""
    parameters: Tally
    """Parameters of public functions, classes and methods: given another value than the default, or required."""
    pairs: Tally
    """Pairs of parameters of one callable that one call has given other values than the defaults."""
    left: int
    """Number of these that are left on purpose, with a reason."""
    left_branches: int = 0
    """Number of branches among those left; 0 in reports of versions that did not count them."""

    @property
    def all_branches(self) -> Tally:
        """Seen branches of all, those left on purpose among them."""
        return Tally(self.branches.seen, self.branches.possible + self.left_branches)


class TorchCoverage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coverage of torch's own Python by runs that a law on numbers, memory, traffic or state has judged."""

    torch: str
    areas: dict[str, AreaCoverage]
    """By name, `all` for their sum."""


def targets(seen: Seen) -> list[Target]:
    """Return everything that can be seen of the installed torch, seen or not."""
    return [*_code_targets(seen), *_interface_targets(seen)]


def count(seen: Seen, reasons: Sequence[Reason]) -> TorchCoverage:
    """Return the coverage by area. Raises UsageError for a reason that matches nothing."""
    found = targets(seen)
    left = left_on_purpose(found, reasons)
    names = [*(area.name for area in AREAS), TOTAL]
    return TorchCoverage(torch=seen.torch, areas={name: _area(found, left.keys(), name) for name in names})


def _area(found: Sequence[Target], left: Collection[Target], name: str) -> AreaCoverage:
    own = [target for target in found if name in (target.area, TOTAL)]
    counts = {kind: [target for target in own if target.kind == kind and target not in left] for kind in _KINDS}
    left_kinds = Counter(target.kind for target in own if target in left)
    tallies = {kind: Tally(sum(target.is_seen for target in each), len(each)) for kind, each in counts.items()}
    return AreaCoverage(
        branches=tallies["branch"],
        functions=tallies["function"],
        parameters=tallies["parameter"],
        pairs=tallies["pair"],
        left=left_kinds.total(),
        left_branches=left_kinds["branch"],
    )


_KINDS = ("branch", "function", "parameter", "pair")


def _code_targets(seen: Seen) -> Iterator[Target]:
    for function in functions(seen.jumps):
        place = f"{function.file}:{function.name}"
        yield Target("function", function.area, place, f"line {function.line}", function.is_called)
        for jumps, is_seen in ((function.seen, True), (function.missing, False)):
            for start, end in sorted(jumps):
                code = f"{_code(function.file, start)} -> {_code(function.file, end)}"
                yield Target("branch", function.area, place, f"line {start} -> {_end(end)}", is_seen, code=code)


def _end(line: int) -> str:
    return str(line) if line > 0 else "return"


def _code(file: str, line: int) -> str:
    """Return the text of a line of torch, without its indent; of a jump out of a function `return`."""
    return linecache.getline(str(torch_directory() / file), line).strip() if line > 0 else "return"


def _interface_targets(seen: Seen) -> Iterator[Target]:
    from conformance.torch_coverage.interfaces import interfaces  # imports torch

    for interface in interfaces():
        values, pairs = seen.values.get(interface.name), seen.pairs.get(interface.name, set())
        optional = [parameter.name for parameter in interface.parameters if parameter.has_default]
        for parameter in interface.parameters:
            used = sorted((values or {}).get(parameter.name, ()))
            is_seen = bool(used) if parameter.has_default else values is not None
            yield Target("parameter", interface.area, interface.name, parameter.name, is_seen, ", ".join(used))
        for one, other in combinations(sorted(optional), 2):
            is_seen = (one, other) in pairs
            yield Target("pair", interface.area, interface.name, f"{one} + {other}", is_seen)
