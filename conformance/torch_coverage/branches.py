"""Branches of torch's files as coverage.py counts them, function by function.

Code of modules and classes runs when torch is imported, before any measurement, and is left out.
"""

import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from conformance.torch_coverage.areas import area_of_files, torch_directory
from conformance.torch_coverage.seen import Jump
from reference_trainer.checks import UsageError


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """Function of a file, with its branches: jumps from a line that has several successors."""

    area: str
    file: str
    """Path below torch's directory."""
    name: str
    """Qualified name."""
    line: int
    """First line that a call executes."""
    is_called: bool
    seen: frozenset[Jump]
    missing: frozenset[Jump]


def require_coverage(*, is_of_reference: bool) -> None:
    """Raise UsageError unless coverage can be measured: of the reference trainer, with coverage.py installed."""
    if not is_of_reference:
        raise UsageError("--torch-coverage is for the reference trainer: leave out --subject")
    if importlib.util.find_spec("coverage") is None:
        raise UsageError("--torch-coverage needs coverage.py: pip install 'fsdp2-tp-conformance[torch-coverage]'")


def functions(jumps: Mapping[str, set[Jump]]) -> list[Function]:
    """Return all functions of the areas, with the branches that are among these jumps between lines."""
    import coverage  # an extra of the package

    root = torch_directory()
    with tempfile.TemporaryDirectory() as scratch:
        data_file, report_file = Path(scratch, "data"), Path(scratch, "report.json")
        data = coverage.CoverageData(basename=str(data_file))
        data.add_arcs({str(root / file): jumps.get(file, set()) for file in area_of_files()})
        data.write()
        analysis = coverage.Coverage(data_file=str(data_file), config_file=False, branch=True)
        analysis.load()
        analysis.json_report([str(root / file) for file in area_of_files()], outfile=str(report_file))
        report: dict[str, Any] = msgspec.json.decode(report_file.read_bytes())
    by_file = {Path(name).resolve(): entry for name, entry in report["files"].items()}
    return [
        function
        for file, area in area_of_files().items()
        for name, region in by_file.get((root / file).resolve(), {"functions": {}})["functions"].items()
        if name and (function := _function(area, file, name, region)) is not None
    ]


def _function(area: str, file: str, name: str, region: Mapping[str, Any]) -> Function | None:
    """Return a function; None for one without a line that counts, such as a method of a protocol."""
    lines = [*region["executed_lines"], *region["missing_lines"]]
    if not lines:
        return None
    seen, missing = (frozenset(map(tuple, region[f"{kind}_branches"])) for kind in ("executed", "missing"))
    called = bool(region["executed_lines"])
    return Function(area=area, file=file, name=name, line=min(lines), is_called=called, seen=seen, missing=missing)
