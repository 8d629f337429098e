"""JSON Schema of report.json and of the lines of report.jsonl: reports satisfy it, and other things do not."""

from pathlib import Path

import msgspec
import pytest

from conformance.report.schema import CaseLine, Footer, Header, line_schema, report_schema
from tests.support.programs import run_python
from tests.support.sample_reports import FACTS, case, deviation, location, report

pytest.importorskip("check_jsonschema", reason="pip install -e .[dev]")
REPORT = report(
    case("PAR-1/a", loss=deviation(1e-6)),
    case("PAR-1/b", "fail", loss=deviation(None)),
    cells={"a": FACTS},
    locations=[location("PAR-1/b")],
)
FOOTER = Footer(planned=1, executed=1, verdicts={"pass": 1}, exit_code=0, duration_s=1.0)


def is_valid(directory: Path, schema: object, *instances: object) -> bool:
    files = []
    for number, content in enumerate((schema, *instances)):
        files.append(directory / f"{number}.json")
        files[-1].write_bytes(msgspec.json.encode(content))
    return run_python("-m", "check_jsonschema", "--schemafile", *map(str, files)).returncode == 0


def header() -> Header:
    fields = msgspec.structs.asdict(REPORT)
    return Header(**{name: fields[name] for name in Header.__struct_fields__})


def test_a_report_satisfies_its_schema(tmp_path: Path) -> None:
    assert is_valid(tmp_path, report_schema(), REPORT)
    builtins = msgspec.to_builtins(REPORT)
    assert not is_valid(tmp_path, report_schema(), {**builtins, "executed": "all"})
    assert not is_valid(tmp_path, report_schema(), {name: builtins[name] for name in builtins if name != "cases"})


def test_lines_of_a_report_satisfy_their_schema(tmp_path: Path) -> None:
    line = CaseLine(**msgspec.structs.asdict(REPORT.cases[0]))
    assert is_valid(tmp_path, line_schema(), header(), line, FOOTER)
    assert not is_valid(tmp_path, line_schema(), REPORT.cases[0]), "without a type"
