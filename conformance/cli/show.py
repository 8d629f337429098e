"""`python -m conformance show ID`: all about one law, cell or defect."""

import argparse
import shlex
import textwrap
from collections.abc import Callable
from contextlib import suppress
from io import StringIO

import msgspec
from ruamel.yaml import YAML
from tabulate import tabulate

from conformance.cli.command import Answer, Commands, add_matrix
from conformance.defects.catalogue import TWIN, defects
from conformance.defects.injection import Defect
from conformance.judge.registry import AssertedLaw, asserted_laws
from conformance.plan.cells import Cell, cell_from_id
from conformance.plan.matrix import Case, Matrix, load_matrix
from conformance.plan.mesh import AxisError
from conformance.plan.selection import nearest, parse
from conformance.project import LAWS_ARGUMENTS
from conformance.pytest_plugin.options import DEFAULT_PROFILE
from reference_trainer.checks import UsageError

_WIDTH = 100


class UnknownId(UsageError):
    """Unknown id; the message names similar ones."""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("show", help="all about one law, cell or defect")
    add_matrix(parser)
    parser.add_argument("id", metavar="ID", help="such as PAR-1, dp2-tp2-fp32-default-meta or grads-summed")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Describe the law, cell or defect of this id. Raises UnknownId if there is none."""
    return Answer(show(load_matrix(options.matrix), options.id))


def show(matrix: Matrix, id_: str) -> str:
    """Return the description of a cell, law or defect; case does not matter. Raises UnknownId for another id."""
    cells, lower = matrix.cells, id_.lower()
    if lower in cells:
        return _cell_text(matrix, cells[lower])
    with suppress(AxisError):
        return _cell_text(matrix, cell_from_id(lower))
    laws, by_id = asserted_laws(), {defect.id: defect for defect in defects()}  # laws and defects take torch
    if id_.upper() in laws:
        return _law_text(matrix, laws[id_.upper()])
    if lower.removesuffix(TWIN) in by_id:
        return _defect_text(matrix, by_id[lower.removesuffix(TWIN)])
    near = nearest(lower, [*laws, *by_id, *cells])
    hint = f"near: {', '.join(near)}" if near else "`conformance laws` names laws and defects, `conformance list` cells"
    raise UnknownId(f"no law, cell or defect has the id `{id_}`; {hint}")


def _law_text(matrix: Matrix, asserted: AssertedLaw) -> str:
    law = asserted.law
    facts = {
        "reference": law.reference,
        "since": f"torch {law.since}",
        "substrates": ", ".join(law.substrates),
        "asserted in": asserted.where,
        "where": law.scope.where.text,
        "gaps": "\n".join(f"{gap.cells}: {gap.reason}" for gap in law.scope.gaps),
        "cases": _by_profile(matrix, lambda case: case.law == law.id),
        "must catch": ", ".join(defect.id for defect in defects() if law.id in defect.laws),
    }
    return f"{law.id}  {law.must}\n\n{_facts_text(facts)}"


def _defect_text(matrix: Matrix, defect: Defect) -> str:
    smallest = _smallest_cases(matrix, defect)
    facts = {
        "source": defect.source,
        "caught by": ", ".join(defect.laws),
        "smallest cells": "\n".join(f"{cell}: {', '.join(laws)}" for cell, laws in _laws_by_cell(smallest).items()),
        "inject": _command(defect, defect.id, smallest),
        "benign twin": _command(defect, defect.id + TWIN, smallest),
        "shows on": f"{', '.join(defect.substrates)}, from torch {defect.since} on",
    }
    return f"{defect.id}  {defect.why}\n\n{_facts_text(facts)}"


def _smallest_cases(matrix: Matrix, defect: Defect) -> list[Case]:
    """Return the smallest case of each law that must catch the defect; none of a law without a case in the profile."""
    cases = matrix.cases(DEFAULT_PROFILE, only=parse(defect.cells))
    smallest: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: _size(case.cell)):
        if case.law in defect.laws:
            smallest.setdefault(case.law, case)
    return list(smallest.values())


def _size(cell: Cell) -> tuple[int, int, str]:
    """Return a key to sort cells by: ranks, then axes with another value than their default."""
    values, defaults = msgspec.structs.asdict(cell), msgspec.structs.asdict(Cell())
    return cell.world_size, len(values.items() - defaults.items()), cell.id


def _laws_by_cell(cases: list[Case]) -> dict[str, list[str]]:
    laws: dict[str, list[str]] = {}
    for case in cases:
        laws.setdefault(case.cell.id, []).append(case.law)
    return laws


def _command(defect: Defect, name: str, smallest: list[Case]) -> str:
    """Return the command that injects a defect or its twin into the smallest cell that shows the defect.

    The cell is one of the profile's; if it has none, any cell of the matrix that shows the defect.
    """
    if smallest:
        selected = f"--laws {smallest[0].law} --cells {smallest[0].cell.id}"
    else:
        selected = f"--profile nightly --cells {shlex.quote(defect.cells)}"
    accelerator = "" if "gloo" in defect.substrates else " --accelerator sim"
    return f"pytest {LAWS_ARGUMENTS} {selected} --defect {name}{accelerator}"


def _cell_text(matrix: Matrix, cell: Cell) -> str:
    """Return a configuration file of the reference trainer, with the other facts as comments."""
    axes = msgspec.structs.asdict(cell)
    exclusion = next((rule for rule in matrix.exclusions if rule.matches(cell)), None)
    laws = {
        f"laws in {profile}": ", ".join(case.law for case in matrix.cases(profile) if case.cell == cell)
        for profile in matrix.profiles
    }
    facts = {
        "axes": textwrap.fill(", ".join(f"{name}={_spelled(value)}" for name, value in axes.items()), _WIDTH),
        "ranks": str(cell.world_size),
        "run alone": f"python -m conformance show {cell.id} > cell.yaml; "
        f"torchrun --nproc-per-node {cell.world_size} -m reference_trainer --config cell.yaml",
        **laws,
        "excluded": exclusion.reason if exclusion else "",
    }
    if exclusion:
        return f"{cell.id}\n\n{_facts_text(facts)}"
    comments = "".join(f"# {line}\n" for line in [cell.id, "", *_facts_text(facts).splitlines()]).replace("# \n", "#\n")
    return comments + _configuration(cell)


def _configuration(cell: Cell) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # its annotation allows None alone
    yaml.dump(msgspec.to_builtins(cell.config), text := StringIO())
    return text.getvalue().rstrip()


def _spelled(value: object) -> str:
    """Return the value of an axis as `--cells` spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _by_profile(matrix: Matrix, chosen: Callable[[Case], bool]) -> str:
    return ", ".join(f"{sum(map(chosen, matrix.cases(profile)))} in {profile}" for profile in matrix.profiles)


def _facts_text(facts: dict[str, str]) -> str:
    """Return a line for each fact; `-` stands for none, but a cell without an exclusion has no line for it."""
    shown = [(name, value or "-") for name, value in facts.items() if value or name != "excluded"]
    return tabulate(shown, tablefmt="plain", disable_numparse=True)
