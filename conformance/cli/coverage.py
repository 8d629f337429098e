"""`python -m conformance coverage`: combinations that laws on numbers see in a profile, and the gaps of laws.

With `--torch` the coverage of torch's own Python, which sessions with `--torch-coverage` have measured.
"""

import argparse
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from tabulate import tabulate

from conformance.cli.command import Answer, Commands, add_matrix, add_profile
from conformance.cli.reports import as_json
from conformance.plan.cells import AxisValue, Cell
from conformance.plan.content import Content
from conformance.plan.coverage import Tally, coverage, covered, impossible_pairs, laws_on, on_numbers
from conformance.plan.matrix import Matrix, load_matrix
from conformance.report.coverage import (
    AXIS_HEADERS,
    LAW_HEADERS,
    TOTAL_HEADERS,
    axis_rows,
    has_judged,
    law_rows,
    total_rows,
)
from conformance.report.schema import read_report
from conformance.report.torch_coverage import area_table, left_table, missing_lines
from conformance.report.wording import counted, spelled
from conformance.torch_coverage.counting import TorchCoverage, count, targets
from conformance.torch_coverage.keeping import Kept, keep
from conformance.torch_coverage.reasons import left_on_purpose, read_reasons
from conformance.torch_coverage.seen import Seen, read_seen
from reference_trainer.checks import UsageError

_SHOWN = 20
"""Missing pairs that are listed without `--missing`."""
_WIDTH = 70
_LAW_WIDTHS = [*[None] * (len(LAW_HEADERS) - 2), _WIDTH, _WIDTH]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("coverage", help="pairs and triples that laws on numbers see, and gaps of laws")
    add_matrix(parser)
    add_profile(parser)
    parser.add_argument(
        "--missing",
        default=str(_SHOWN),
        metavar="N",
        help="list up to N missing pairs, or `all` (default: %(default)s)",
    )
    parser.add_argument(
        "--torch",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="instead: branches and parameters of torch that the sessions of these reports have seen together",
    )
    parser.add_argument(
        "--keep", action="store_true", help="with --torch: keep the figures in docs/torch_coverage.json"
    )
    parser.add_argument("--json", action="store_true", help="all numbers as JSON, as in report.json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Print the coverage of a profile. Raises UsageError for a matrix, a profile or a number that is none."""
    limit = _limit(options.missing)
    if options.torch or options.keep:
        return _torch_answer(options, limit)
    matrix = load_matrix(options.matrix)
    cells = matrix.profile_cells(options.profile)
    profile = coverage(matrix, cells)
    if options.json:
        return Answer(as_json(profile))
    seen_on = on_numbers(matrix, laws_on(matrix, cells))
    sections = [
        f"profile {options.profile}: {len(seen_on)} of {counted(len(cells), 'cell')} have a law on numbers",
        _numbers(total_rows(profile), TOTAL_HEADERS),
        _numbers(axis_rows(profile), AXIS_HEADERS),
        *_missing(matrix, cells, seen_on, limit),
        *_excluded(matrix.content),
        tabulate(law_rows(profile), headers=LAW_HEADERS, disable_numparse=True, maxcolwidths=_LAW_WIDTHS),
    ]
    return Answer("\n\n".join(sections))


def _torch_answer(options: argparse.Namespace, limit: int | None) -> Answer:
    """Return the coverage of torch in all reports together, and keep its figures if that is asked for.

    Raises UsageError for a report without it, for one of another torch than the installed one, whose lines differ, and
    for reports of several profiles whose figures are to be kept.
    """
    if not options.torch:
        raise UsageError("--keep needs --torch DIR: whose figures?")
    seen = Seen()
    for directory in options.torch:
        seen.add(read_seen(directory))
    if seen.torch != (installed := importlib.metadata.version("torch")):
        raise UsageError(f"measured with torch {seen.torch}, and torch {installed} is installed: lines differ")
    reasons = read_reasons()
    covered = count(seen, reasons)
    if options.keep:
        _keep(options, covered)
    if options.json:
        return Answer(as_json(covered))
    found = targets(seen)
    left = left_on_purpose(found, reasons)
    lines = missing_lines(found, left)
    shown = lines[:limit]
    more = [f"... and {len(lines) - len(shown)} more: see --missing all"] * (len(lines) > len(shown))
    return Answer("\n\n".join([area_table(covered), "missing:\n" + "\n".join([*shown, *more]), left_table(left)]))


def _keep(options: argparse.Namespace, covered: TorchCoverage) -> None:
    """Keep the coverage of reports together, with the number of their cases."""
    reports = [read_report(directory) for directory in options.torch]
    profiles = {report.profile for report in reports}
    if len(profiles) > 1:
        raise UsageError(f"--keep: these reports are of several profiles: {', '.join(sorted(profiles))}")
    [profile] = profiles
    judged = {case.id for report in reports for case in report.cases if has_judged(case, needs_measurement=False)}
    planned = [*load_matrix(options.matrix).cases(profile)]
    keep(profile, Kept(covered=covered, cases=Tally(len(judged), len(planned))))


def _limit(text: str) -> int | None:
    """Return the number of missing pairs to list, None for all."""
    if text != "all" and not text.isdecimal():
        raise UsageError(f"--missing {text}: write a number of pairs, or `all`")
    return None if text == "all" else int(text)


def _numbers(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table of which all columns but the first are numbers."""
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=["left", *["right"] * (len(headers) - 1)])


def _missing(matrix: Matrix, cells: Sequence[Cell], seen_on: Sequence[Cell], limit: int | None) -> Iterator[str]:
    """Yield a table of the first missing pairs, if there are any, with the number of the others."""
    missing = covered(matrix.content, seen_on, 2).missing
    if not missing:
        return
    shown = missing[:limit]
    rows = [[_selection(pair), sum(_has(cell, pair) for cell in cells)] for pair in shown]
    table = tabulate(rows, headers=["missing pair", "cells without a law on numbers"])
    more = len(missing) - len(shown)
    yield f"{table}\n... and {more} more: see --missing all" if more else table


def _excluded(content: Content) -> Iterator[str]:
    """Yield the pairs that no cell can have, by exclusion."""
    impossible_by_rules = impossible_pairs(content)
    excluded = [pair for impossible in impossible_by_rules for pair in impossible.pairs]
    rows = [
        [
            len(impossible.pairs),
            _selection(impossible.pairs[0]),
            "\nand ".join(rule.when for rule in impossible.exclusions) or "more than two exclusions together",
            "\nand ".join(rule.reason for rule in impossible.exclusions),
        ]
        for impossible in impossible_by_rules
    ]
    if rows:
        headers = ["pairs", "for example", "impossible where", "reason"]
        table = tabulate(rows, headers=headers, maxcolwidths=[None, None, _WIDTH, _WIDTH])
        yield f"{counted(len(excluded), 'pair')} of values excluded:\n\n{table}"


def _has(cell: Cell, pair: Mapping[str, AxisValue]) -> bool:
    return pair.items() <= msgspec.structs.asdict(cell).items()


def _selection(pair: Mapping[str, AxisValue]) -> str:
    """Return values by axis as `--cells` takes them: `compile = true and offload = cpu`."""
    return " and ".join(f"{axis} = {spelled(value)}" for axis, value in pair.items())
