"""`python -m conformance docs`: generated parts of the documentation, checked and written.

Counts come from the matrix, the laws and the docstrings; durations from docs/measured.json, which
`python -m benchmarks.profiles` writes. A duration of a profile that has other cases now is replaced by the estimate
that matrix.lock gives.
"""

import argparse
import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from tabulate import tabulate

from conformance.cli import blind_spot_kinds, clients_table, features, kinds_document
from conformance.cli.blocks import with_block
from conformance.cli.command import Answer, Commands
from conformance.cli.laws import specification_markdown
from conformance.cli.reports import as_json
from conformance.findings.symptoms import read_symptoms, symptoms_markdown
from conformance.findings.table import CATALOGUE, TRAINERS, catalogue, findings, read_versions, worst
from conformance.judge.registry import asserted_laws
from conformance.plan.lock import STARTUP_S
from conformance.plan.matrix import Matrix, load_matrix
from conformance.project import LAWS_DIRECTORY, LAYERS, PROJECT, TORCH_FREE, data_file, require_checkout
from conformance.report.schema import line_schema, report_schema
from conformance.report.torch_coverage import markdown_document
from conformance.run.kinds import described, kinds
from conformance.torch_coverage.keeping import read_kept

MEASURED_FILE = PROJECT / "docs" / "measured.json"
_ABOUT = {
    "PAR, EP, AMP": "a parallel run computes what one process computes (fp32), or its emulation (bf16, fp16)",
    "MP": "dtypes of parameters, computation, communication, gradients and optimizer state are those asked for",
    "INIT, CKPT": "`to_empty` leaves nothing uninitialised, no mesh changes the weights, runs resume bit by bit",
    "RS, PP, AC, MEM": "collectives and recomputation follow the schedule, memory the model, in each reshard mode",
    "CLIP, OFF": "gradients are clipped by the norm of all of them, on every mesh, offloaded to the CPU or not",
    "STREAM, API, LIFE, DT, TP, CP, MESH, LOUD": "streams wait; FSDP2, DTensor, styles, rings, meshes, odd ranks",
    "OPT, DATA, AXIS, ENV": "what is trained, on what; each option takes effect; preconditions of the suite",
}
"""Subject of the laws, by family of ids."""
_WRITE = "python -m conformance docs --write"


class Durations(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Measured durations of a session that was repeated, in seconds."""

    cases: int
    """Cases that the session had; the durations are stale as soon as the profile has more or fewer."""
    durations_s: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    processors: int
    torch: str
    load_before: float | None = None
    """Load average of the machine before the first session: above 1/2, other programs took part of its processors."""
    processor_s: int | None = None
    """Seconds of processors that one session and its processes used, which other programs do not change."""


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of docs/measured.json."""

    first_command: Durations | None = None
    """Durations of the README's first command in a fresh clone, set-up included."""
    profiles: dict[str, Durations] = {}
    installing_s: dict[str, float] = {}
    """Durations of `pip install` of torch, the suite and a client in a new environment, by client."""


def read_measured() -> Measured:
    """Read docs/measured.json; nothing is measured if there is no such file."""
    return msgspec.json.decode(MEASURED_FILE.read_bytes(), type=Measured) if MEASURED_FILE.exists() else Measured()


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("docs", help="are generated parts of README and docs stale? exit status 1 if any is")
    parser.add_argument("--write", action="store_true", help="bring them up to date")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Check the generated parts of the documentation, or write them. Raises UsageError outside of a checkout."""
    require_checkout("docs")
    contents = generated()
    stale = [file for file, content in contents.items() if not file.exists() or file.read_text() != content]
    names = ", ".join(str(file.relative_to(PROJECT)) for file in stale)
    if not options.write:
        return Answer(f"stale: {names}; write them with {_WRITE}" if stale else "up to date", status=int(bool(stale)))
    for file in stale:
        file.write_text(contents[file])
    return Answer(f"written: {names}" if stale else "up to date")


def generated() -> dict[Path, str]:
    """Return each file with generated parts, with its content as it should be.

    Raises UsageError for a file without the marks of a block.
    """
    matrix, measured = load_matrix(data_file("matrix.yaml")), read_measured()
    docs = PROJECT / "docs"
    readme = {
        "first-command": lambda: _first_command(matrix, measured),
        "findings": lambda: worst(findings(), read_versions()),
        "families": lambda: _families(matrix),
        "profiles": lambda: _profiles(matrix, measured),
    }
    return {
        PROJECT / "README.md": _with_blocks(PROJECT / "README.md", readme),
        docs / "architecture.md": _with_blocks(docs / "architecture.md", {"packages": _packages}),
        docs / "judge_your_trainer.md": _with_blocks(
            docs / "judge_your_trainer.md",
            {
                "kinds": _kinds,
                "subject-laws": _subject_laws,
                "subjects": _subjects,
                "clients": lambda: _clients(measured),
            },
        ),
        LAWS_DIRECTORY / "README.md": specification_markdown() + "\n",
        docs / "report.schema.json": as_json(report_schema()) + "\n",
        CATALOGUE: catalogue(
            findings(), read_versions(), trainers=findings(TRAINERS), trainer_versions=read_versions(TRAINERS)
        ),
        docs / "report_line.schema.json": as_json(line_schema()) + "\n",
        docs / "symptoms.md": symptoms_markdown(read_symptoms(), findings()),
        docs / "torch_coverage.md": "\n".join(
            [markdown_document(read_kept()), blind_spot_kinds.section(matrix), features.section(matrix)]
        ),
        **_fidelity(),
        **_published(),
        kinds_document.DOCUMENT: kinds_document.as_markdown(),
    }


def _fidelity() -> dict[Path, str]:
    """Return the page on the rules of the simulated device."""
    from conformance.sim_runs.fidelity.report import DOCUMENT, as_markdown

    return {DOCUMENT: as_markdown()}


def _published() -> dict[Path, str]:
    """Return the page on published runs, whose predictions need torch."""
    from conformance.sizing.published import published_markdown, read_published

    return {PROJECT / "docs" / "predict.md": published_markdown(read_published())}


def _with_blocks(file: Path, contents: Mapping[str, Callable[[], str]]) -> str:
    text = file.read_text()
    for name, content in contents.items():
        text = with_block(text, name, content())
    return text


def _first_command(matrix: Matrix, measured: Measured) -> str:
    took = measured.first_command
    if took is None:
        judged = f"judges {len(matrix.cases('smoke'))} cases in {_estimated(matrix, 'smoke')}"
        return f"The first command installs torch and what the suite needs, then {judged}."
    shared = took.load_before is not None and took.load_before > took.processors / 2
    others = f", which other programs shared (load {took.load_before})" if shared else ""
    used = f"{took.processor_s / 60:.1f} min of processor time, " if took.processor_s else ""
    return (
        f"Measured once, in a new clone: {used}{_minutes(took)} on {took.processors} processors{others}, for the "
        f"installation of torch {took.torch} and {took.cases} cases."
    )


def _profiles(matrix: Matrix, measured: Measured) -> str:
    rows = []
    for name, profile in matrix.profiles.items():
        cases = matrix.cases(name)
        took = _current(matrix, name, measured.profiles.get(name))
        takes = f"{_minutes(took)}, {took.processors} processors" if took else _estimated(matrix, name)
        rows.append([f"`{name}`", profile.note, len({case.cell for case in cases}), len(cases), takes])
    return tabulate(rows, headers=["profile", "for", "cells", "cases", "takes"], tablefmt="github")


def _estimated(matrix: Matrix, profile: str) -> str:
    expected_s = STARTUP_S + sum(matrix.seconds[cell.id] for cell in {case.cell for case in matrix.cases(profile)})
    return f"about {expected_s / 60:.0f} min, estimated"


def _current(matrix: Matrix, profile: str, took: Durations | None) -> Durations | None:
    """Return the durations, or None if the profile had other cases when it was measured."""
    return took if took and len(matrix.cases(profile)) == took.cases else None


def _minutes(took: Durations) -> str:
    """Return the shortest and the longest duration in words."""
    shortest, longest = min(took.durations_s) / 60, max(took.durations_s) / 60
    digits = 0 if longest >= 10 else 1
    return " to ".join(dict.fromkeys(f"{minutes:.{digits}f}" for minutes in (shortest, longest))) + " min"


def _families(matrix: Matrix) -> str:
    """Return a table of the subjects of laws. Raises ValueError if it does not name each family of ids once."""
    named = sorted(family for families in _ABOUT for family in families.split(", "))
    if named != (ids := sorted({law.partition("-")[0] for law in matrix.laws()})):
        raise ValueError(f"_ABOUT names laws {named}, the matrix has {ids}: say in _ABOUT what each is about")
    return tabulate(_ABOUT.items(), headers=["laws", "what MUST hold"], tablefmt="github")


def _kinds() -> str:
    """Return a table of the examples that `conformance judge --init` writes."""
    rows = [(f"[{kind}]({kinds_document.DOCUMENT.name}#{kind})", described(kind)[0]) for kind in kinds()]
    return tabulate(rows, headers=["kind", "example"], tablefmt="github")


def _subject_laws() -> str:
    """Return a table of the laws for subjects."""
    laws = [asserted.law for asserted in asserted_laws().values() if asserted.law.scope.of == "any trainer"]
    rows = [[f"`{law.id}`", law.like, law.must] for law in laws]
    return tabulate(rows, headers=["law", "like", "MUST"], tablefmt="github", disable_numparse=True)


def _subjects() -> str:
    """Return tables of the verdicts on released trainers that docs/subjects/ keeps."""
    from conformance.subjects import keeping  # torch is for those who ask for this page

    return keeping.table(keeping.read_kept())


def _clients(measured: Measured) -> str:
    """Return a table of the clients of the first trials: lines, durations and verdicts."""
    from conformance.subjects import keeping  # torch is for those who ask for this page

    kept = keeping.read_kept()
    return clients_table.table(
        failing={name: keeping.failing_laws(subject) for name, subject in kept.items()},
        judging_s={name: subject.duration_s for name, subject in kept.items()},
        installing_s=measured.installing_s,
    )


def _packages() -> str:
    """Return a table of all packages by layer, with the first sentences of their docstrings."""
    rows = [
        [number, f"`{package}`", "no torch" * (package in TORCH_FREE), _purpose(package)]
        for number, layer in enumerate(LAYERS, start=1)
        for package in layer
    ]
    return tabulate(rows, headers=["layer", "package", "", "what it is for"], tablefmt="github")


def _purpose(package: str) -> str:
    if "*" in package:
        return "The modules that stand in no package."
    return _first_sentence(PROJECT / package / "__init__.py")


def _first_sentence(file: Path) -> str:
    """Return the first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split())
