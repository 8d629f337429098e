"""`python -m conformance docs`: what the documentation says of the suite itself, generated and checked.

A block stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. Counts come from the matrix, the laws and the
defects as they are; durations from docs/measured.json, which `python -m benchmarks.profiles` writes.
"""

import argparse
import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from tabulate import tabulate

from conformance.cli import laws, schema
from conformance.cli.command import Answer, Commands
from conformance.judge.waivers import Waiver, load_waivers
from conformance.plan.matrix import Matrix, load_matrix
from conformance.project import PACKAGE, PROJECT

MEASURED = PROJECT / "docs" / "measured.json"
_MEASURE = "python -m benchmarks.profiles"


class Duration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured duration of a session."""

    cases: int
    """Cases that the session had; the duration is stale as soon as there are more or fewer."""
    seconds: int
    processors: int
    torch: str


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of docs/measured.json."""

    first_command: Duration | None = None
    """Duration of the README's first command in a fresh clone, set-up included."""
    profiles: dict[str, Duration] = {}


def read_measured() -> Measured:
    """Read docs/measured.json; nothing is measured if there is no such file."""
    return msgspec.json.decode(MEASURED.read_bytes(), type=Measured) if MEASURED.exists() else Measured()


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "docs", help="which generated parts of README and docs are stale; exit status 1 if any"
    )
    parser.add_argument("--write", action="store_true", help="bring them up to date")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Check the generated parts of the documentation, or write them."""
    texts = generated()
    stale = [str(file.relative_to(PROJECT)) for file, text in texts.items() if not _is_current(file, text)]
    if not options.write:
        remedy = "write them with python -m conformance docs --write"
        return Answer(f"stale: {', '.join(stale)}; {remedy}" if stale else "up to date", status=int(bool(stale)))
    for file, text in texts.items():
        file.write_text(text)
    return Answer(f"written: {', '.join(stale) or 'nothing, all were up to date'}")


def generated() -> dict[Path, str]:
    """Return each file with generated parts, with its content as it should be.

    Raises ValueError for a file without the marks of its blocks, and for a duration of a profile that has other cases.
    """
    matrix = load_matrix(PROJECT / "matrix.yaml")
    measured = read_measured()
    blocks: dict[str, dict[str, Callable[[], str]]] = {
        "README.md": {
            "first-command": lambda: _first_command(matrix, measured),
            "findings": lambda: _findings(matrix),
            "families": _families,
            "profiles": lambda: _profiles(matrix, measured),
        },
        "docs/architecture.md": {"folders": _folders},
    }
    texts = {PROJECT / name: _with_blocks(PROJECT / name, makers) for name, makers in blocks.items()}
    return texts | {laws.PAGE: laws.laws_page(), **schema.files()}


def _is_current(file: Path, text: str) -> bool:
    return file.exists() and file.read_text() == text


def _with_blocks(file: Path, makers: dict[str, Callable[[], str]]) -> str:
    text = file.read_text()
    for name, make in makers.items():
        block = re.compile(f"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        if not block.search(text):
            raise ValueError(f"{file.name} has no block {name}: add <!-- {name}: begin --> and <!-- {name}: end -->")
        content = make()
        text = block.sub(lambda match, content=content: f"{match[1]}{content}\n{match[2]}", text)
    return text


def _first_command(matrix: Matrix, measured: Measured) -> str:
    duration = measured.first_command
    if duration is None:
        return f"How long the first command takes has not been measured (`{_MEASURE} --first-command`)."
    _require_current(matrix, "smoke", duration)
    return (
        f"The first command takes {_minutes(duration)} in a fresh clone with {duration.processors} processors, the "
        "installation of torch included."
    )


def _profiles(matrix: Matrix, measured: Measured) -> str:
    purposes = {
        "smoke": "every commit",
        "pr": "pull requests (default)",
        "nightly": "everything in matrix.yaml",
        "certify": "a node with 8 GPUs; nothing waived, nothing unsupported",
    }
    rows = []
    for name in matrix.profiles:
        cases = matrix.cases(name)
        duration = measured.profiles.get(name)
        if duration is not None:
            _require_current(matrix, name, duration)
        took = f"{_minutes(duration)}, {duration.processors} processors" if duration else "not measured"
        rows.append([f"`{name}`", purposes.get(name, ""), len({case.cell for case in cases}), len(cases), took])
    return tabulate(rows, headers=["profile", "for", "cells", "cases", "takes"], tablefmt="github")


def _require_current(matrix: Matrix, profile: str, duration: Duration) -> None:
    cases = len(matrix.cases(profile))
    if duration.cases != cases:
        raise ValueError(
            f"docs/measured.json has the duration of {duration.cases} cases of profile {profile}, which has {cases} now: "
            f"measure again with {_MEASURE} {profile}"
        )


def _minutes(duration: Duration) -> str:
    minutes = duration.seconds / 60
    return f"{minutes:.0f} min" if minutes >= 10 else f"{minutes:.1f} min"


def _findings(matrix: Matrix) -> str:
    """Faults of torch that are waived, by issue."""
    by_issue: dict[str, list[Waiver]] = {}
    for waiver in load_waivers(PROJECT / "waivers.yaml", matrix, today=None):
        by_issue.setdefault(waiver.issue, []).append(waiver)
    rows = []
    for issue, waivers in by_issue.items():
        number = issue.rpartition("/")[2]
        laws_ = ", ".join(dict.fromkeys(waiver.law for waiver in waivers))
        rows.append([" ".join(_versions(waivers)), waivers[0].reason, laws_, f"[{number}]({issue})"])
    return tabulate(rows, headers=["torch", "fault", "laws", "issue"], tablefmt="github", disable_numparse=True)


def _versions(waivers: list[Waiver]) -> Iterator[str]:
    first = min(waiver.versions[0] for waiver in waivers)
    last = max(waiver.versions[1] for waiver in waivers)
    yield " - ".join(".".join(map(str, release)) for release in (first, last))


def _families() -> str:
    """Files of laws with their docstrings, such as `PAR: a parallel run computes what one process computes`."""
    rows = []
    for file in sorted((PACKAGE / "laws").glob("test_*.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        ids, _, statement = docstring.splitlines()[0].partition(": ")
        rows.append([ids, statement])
    return tabulate(rows, headers=["laws", "what MUST hold"], tablefmt="github")


def _folders() -> str:
    """Packages in the order of `conformance.project.LAYERS`, with the first sentence of their docstrings."""
    raise NotImplementedError
