"""Outcomes of tests, as pytest's JUnit XML has them, and the cause of each in one line that equal causes share."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import msgspec

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
IMPORT = "import"
"""Name of the failure of a file that cannot be imported."""
_MAX_CAUSE = 160
_ERROR_LINE = re.compile(r"^(?:E +)?((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?::.*)?)$")
_WRAPPERS = re.compile(r"^RuntimeError: (Process|Thread) \d+ (exited|terminated)|^RuntimeError: Exception in worker")
"""Errors by which torch's harness passes on that of a rank, which stands below."""
_CONSEQUENCES = re.compile(r"Connection (closed|reset) by peer|Broken pipe|connectFullMesh failed|CheckpointException")
"""Errors of ranks that wait for one that has failed, or that report the failure of another."""
_VARYING = (
    (re.compile(r"0x[0-9a-f]+"), "0x…"),
    (re.compile(r"/(?:[\w.+-]+/)+"), "…/"),
    (re.compile(r"-?\d+\.\d+(e[-+]?\d+)?"), "…"),
    (re.compile(r":\d{4,5}\b"), ":…"),
    (re.compile(r"tensor\(.*"), "tensor(…"),
)


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Outcome of a test."""

    test: str
    """`FILE::CLASS::NAME`, with the path of the file below `test/`."""
    outcome: Literal["passed", "failed", "skipped"]
    cause: str = ""
    """Last line of the error of the first rank that failed, or the reason of the skip; without numbers that vary."""
    duration_s: float = 0.0


def read_junit(file: Path, name: str) -> list[Outcome]:
    """Return the outcomes of the tests in a test file from its JUnit XML; a failed import is one failed test."""
    return [_outcome(case, name) for case in ElementTree.parse(file).getroot().iter("testcase")]


def _outcome(case: ElementTree.Element, name: str) -> Outcome:
    owner = case.get("classname", "").rpartition(".")[2]
    test = f"{name}::{owner}::{case.get('name')}" if owner else f"{name}::{IMPORT}"
    duration_s = round(float(case.get("time", "0")), 2)
    for element in case:
        if element.tag in ("failure", "error"):
            text = f"{element.text or ''}\n{element.get('message', '')}"
            return Outcome(test, "failed", cause(text), duration_s)
        if element.tag == "skipped":
            return Outcome(test, "skipped", " ".join((element.get("message") or "").split()), duration_s)
    return Outcome(test, "passed", "", duration_s)


def cause(text: str) -> str:
    """Return the last line of the first error in the output of a failed test that no rank only passes on."""
    errors = [error for error in _errors(text) if not _WRAPPERS.search(error)]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((error for error in errors if not _CONSEQUENCES.search(error)), errors[0] if errors else "")
    line = first or next(iter(lines), "no output")
    for pattern, replacement in _VARYING:
        line = pattern.sub(replacement, line)
    return line[:_MAX_CAUSE]


def _errors(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if found := _ERROR_LINE.match(line.strip()):
            yield found[1]
