"""Programs of `findings/`, described by their docstrings, and tables of them: the installed torch, all versions."""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from packaging.version import Version
from tabulate import tabulate

from conformance.findings.execution import PRESENT, Outcome
from conformance.project import PROJECT
from reference_trainer.checks import UsageError

DIRECTORY = PROJECT / "findings"
TRAINERS = DIRECTORY / "trainers"
"""Directory of the programs about other packages than torch."""
TORCH = "torch"
NO_THREAD = "none known"
NO_LAW = "none"
_SEVERITIES, _VISIBLE = ("high", "medium", "low"), ("silent", "hang", "loud")
_LAW = r"^([A-Z]+-[0-9]+|[a-z0-9]+(-[a-z0-9]+)*)\Z"
_FIELD = re.compile(r"^(\w+): +(\S.*)$")

Text = Annotated[str, Meta(pattern=r"\S")]


class Finding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fault of torch or of a trainer, as its program's docstring describes it."""

    name: str
    """Name of the program, without `.py`."""
    title: Text
    """Description of the fault in one sentence: the first paragraph."""
    details: Text
    """Known cause: the paragraphs after the title."""
    severity: Literal["high", "medium", "low"]
    """Damage to a training run that meets the fault."""
    visible: Literal["silent", "hang", "loud"]
    """`silent`: numbers are wrong, or memory is held; `hang`: the run waits until a time limit; `loud`: an error."""
    training: Text
    """Effect on a training run."""
    thread: Annotated[str, Meta(pattern=rf"^(https://\S+|{NO_THREAD})\Z")]
    """Address of a public thread about the fault, or `none known`."""
    law: Annotated[str, Meta(pattern=_LAW)]
    """Law that fails, one for subjects if the fault is a trainer's, or `none`."""
    avoid: Text
    """Advice for users of such a torch."""
    ranks: Annotated[int, Meta(ge=1, le=8)]
    """Number of processes that the program needs."""
    package: Text = TORCH
    """Distribution that has the fault."""

    @property
    def file(self) -> Path:
        """Path of the program."""
        return (DIRECTORY if self.package == TORCH else TRAINERS) / f"{self.name}.py"

    @property
    def has_thread(self) -> bool:
        """True if a public thread describes the fault."""
        return self.thread != NO_THREAD

    @property
    def order(self) -> tuple[int, int, bool, str]:
        """Sort key: severity, then visibility (silent first), then unreported first."""
        return _SEVERITIES.index(self.severity), _VISIBLE.index(self.visible), self.has_thread, self.name


def findings(directory: Path = DIRECTORY) -> list[Finding]:
    """Return the findings of a directory, the worst first.

    Raises UsageError for a program without a valid docstring.
    """
    return sorted(map(read_finding, directory.glob("*.py")), key=lambda finding: finding.order)


def read_finding(file: Path) -> Finding:
    """Return the finding in a program's docstring, without importing the program.

    The first paragraph is the title, the last consists of lines `FIELD: VALUE`, and those between are the details.
    Raises UsageError for a field that is missing, unknown or wrong.
    """
    paragraphs = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")
    fields = dict(_field(line, file) for line in paragraphs[-1].splitlines())
    if not fields:
        raise UsageError(f"{file.name}: write a docstring that ends with lines `severity: high`, ...")
    try:
        about = {**fields, "name": file.stem, "title": " ".join(paragraphs[0].split())}
        about["details"] = "\n\n".join(paragraphs[1:-1])
        return msgspec.convert(about, Finding, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file.name}: the fields of its docstring: {error}") from None


def _field(line: str, file: Path) -> tuple[str, str]:
    match = _FIELD.match(line)
    if match is None:
        raise UsageError(f"{file.name}: the docstring must end with lines `FIELD: VALUE`, found {line!r}")
    return match[1], match[2]


VERSIONS_FILE = "versions.json"
"""File with outcomes in the directory of the programs."""
CATALOGUE = DIRECTORY / "README.md"
WORST = 6
_NEWEST = 3
"""Number of newest versions whose faults `worst` shows."""
_INTRODUCTION = """# Bugs found in released PyTorch

Written by `conformance findings --write`, which runs every program on the installed torch and keeps the outcome in
`versions.json`. Each program needs torch alone, prints what it expected and what it got, and ends with status 1 if the
fault is there, 0 if not, and 2 if torch refuses or lacks what it needs:

    torchrun --nproc-per-node RANKS findings/NAME.py
    conformance findings                             # all of them on the installed torch

torchrun makes status 1 of 2; `conformance findings` tells them apart. All outcomes are those of CPUs and gloo;
without an accelerator, programs about streams use the simulated one, and say nothing measured on a GPU.

Outcomes: **wrong** (the fault is there), right, refused (torch says that it cannot), **hangs**, **dies**, error (the
program failed and says nothing about torch), and nothing where it was not run. "None known" means that no thread was
found in a stored copy of GitHub's; it is no proof. `conformance findings --report NAME` prints a text to file."""

_TRAINERS = """## Bugs found in released trainers

Each program needs the package that its docstring names, beside torch. `conformance findings` runs those whose package
is installed. A private name that a program touches is one that lets the package run on CPUs. Laws are those by which
`conformance judge` judges ([judge_your_trainer](../docs/judge_your_trainer.md))."""

_REPORT = """# {title}

{details}

In training: {training}. To avoid it: {avoid}.

`torchrun --nproc-per-node {ranks} {name}.py` ends with status 1 if the fault is there:

```python
{program}
```

It prints with {versions}, on CPUs and gloo:

```
{output}
```

Outcomes by version of {package}:

{outcomes}"""

Versions = dict[str, dict[str, Outcome]]
"""Outcome by name of the program, by version of torch, or by package and version, such as `accelerate 1.15.0`."""


def read_versions(directory: Path = DIRECTORY) -> Versions:
    """Return the outcomes of all versions on which the programs were run; empty without the file."""
    file = directory / VERSIONS_FILE
    return msgspec.json.decode(file.read_bytes(), type=Versions) if file.exists() else {}


def with_version(versions: Versions, version: str, outcomes: Mapping[str, Outcome], names: Sequence[str]) -> Versions:
    """Return the outcomes with those of a version added, for the existing programs only, in order of versions."""
    known = {**versions.get(version, {}), **outcomes}
    every = {**versions, version: {name: known[name] for name in names if name in known}}
    return {version: every[version] for version in sorted(every, key=order_of_version)}


def order_of_version(version: str) -> tuple[str, Version]:
    """Return a key to sort keys of `Versions` by."""
    package, _, number = version.rpartition(" ")
    return package, Version(number)


def catalogue(
    findings: Sequence[Finding], versions: Versions, *, trainers: Sequence[Finding], trainer_versions: Versions
) -> str:
    """Return `findings/README.md`: findings of torch, and those of trainers."""
    known = [_row(each, f"{each.name}.py", [_shown(column, each) for column in versions.values()]) for each in findings]
    shown_on = {
        each.name: ", ".join(
            f"{v}: {_shown(column, each)}" for v, column in trainer_versions.items() if each.name in column
        )
        for each in trainers
    }
    in_trainers = [_row(each, f"trainers/{each.name}.py", [shown_on[each.name]]) for each in trainers]
    tables = _markdown(known, _headers(versions)), _markdown(in_trainers, _headers(["versions"]))
    return "\n\n".join([_INTRODUCTION, tables[0], _TRAINERS, tables[1]]) + "\n"


def _headers(versions: Iterable[str]) -> list[str]:
    return ["program", "what", "severity", "training", *versions, "law", "thread", "how to avoid it"]


def _row(finding: Finding, file: str, outcomes: Sequence[str]) -> list[str]:
    severity = f"{finding.severity}, {finding.visible}"
    about = [f"[{finding.name}]({file}), {finding.ranks}", finding.title, severity, finding.training]
    return [*about, *outcomes, finding.law, _thread(finding), finding.avoid]


def report(finding: Finding, versions: Versions, *, ran_with: str, output: str) -> str:
    """Return a report to file upstream: the fault and its cause, the program, its output, and versions that show it."""
    pairs = ((version, shown[finding.name]) for version, shown in versions.items() if finding.name in shown)
    outcomes = "\n".join(f"- {version}: {outcome}" for version, outcome in pairs)
    return _REPORT.format(
        title=finding.title.rstrip("."),
        details=finding.details,
        training=finding.training,
        avoid=finding.avoid,
        ranks=finding.ranks,
        name=finding.name,
        program=finding.file.read_text().strip(),
        versions=ran_with,
        package=finding.package,
        output=output.strip(),
        outcomes=outcomes,
    )


def worst(findings: Sequence[Finding], versions: Versions) -> str:
    """Return a table of the findings that do most damage and are seen least, with the versions that show them.

    Only findings that one of the newest versions shows; for older versions there is `conformance findings`.
    """
    newest = list(versions.values())[-_NEWEST:]
    recent = [each for each in findings if any(outcomes.get(each.name) in PRESENT for outcomes in newest)]
    rows = [
        [
            _seen(finding, versions),
            f"[{finding.title.rstrip('.')}](findings/{finding.name}.py)",
            finding.law,
            _thread(finding),
        ]
        for finding in recent[:WORST]
    ]
    return _markdown(rows, ["torch", "fault", "law", "thread"])


def installed(findings: Sequence[Finding], outcomes: Mapping[str, Outcome]) -> str:
    """Return the table that the command prints, for a terminal."""
    rows = [
        [outcomes[f.name], f"{f.severity}, {f.visible}", f.name, f.training if outcomes[f.name] in PRESENT else ""]
        for f in findings
    ]
    return tabulate(rows, headers=["outcome", "severity", "finding", "what training sees"], tablefmt="simple")


def _seen(finding: Finding, versions: Versions) -> str:
    """Return the minor versions that show a finding: `2.8, 2.11 to 2.15`, of versions that were tried one by one."""
    runs: list[list[str]] = []
    previous = False
    for version, outcomes in versions.items():
        minor, shown = ".".join(version.split(".")[:2]), outcomes.get(finding.name) in PRESENT
        if shown:
            runs = [*runs[:-1], [*runs[-1], minor]] if previous else [*runs, [minor]]
        previous = shown
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs) or "-"


def _shown(outcomes: Mapping[str, Outcome], finding: Finding) -> str:
    outcome = outcomes.get(finding.name, "")
    return f"**{outcome}**" if outcome in PRESENT else outcome


def _thread(finding: Finding) -> str:
    return f"[{finding.thread.rpartition('/')[2]}]({finding.thread})" if finding.has_thread else NO_THREAD


def _markdown(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
