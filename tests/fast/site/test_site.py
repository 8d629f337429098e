"""Site of many reports: its page as HTML, and texts that its script shows, run by Node with a stub of a browser."""

import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from conformance.__main__ import main
from conformance.report.schema import Report
from conformance.site.content import CODES, content_of
from conformance.site.pages import brief, gravest, site_files, table_rows, trend, with_links
from reference_trainer.checks import UsageError
from tests.fast.report.test_html import Outline
from tests.support.sample_reports import case, deviation, report

DP, TP = "dp2-fp32-default-meta", "dp2-tp2-fp32-default-meta"
MAX_BYTES = 5 * 10**6
_STUB = """
const listeners = {}, found = {};
function made(name) {
  return { name, children: [], value: "0", setAttribute(key, value) { this[key] = value; },
    append(...children) { this.children.push(...children); },
    replaceChildren(...children) { this.children = children; }, addEventListener() {}, scrollIntoView() {} };
}
const document = { getElementById: id => found[id] ||= made(id), createElement: made };
const window = { addEventListener() {} }, location = { hash: process.argv[2] };
document.getElementById("after").value = "1";
"""
_PRINTED = """
const words = node => typeof node === "string" ? [node] : node.children.flatMap(words);
console.log(JSON.stringify({ chosen: words(found["chosen"] || made("")), difference: words(found["difference"]) }));
"""


_GIVEN = [("2.10.0", "smoke"), ("2.10.0", "pr"), ("2.6.0", "pr")]


def reports() -> list[Report]:
    """Two versions: one case begins to fail, one is waived in both, one is new."""
    waived = replace(case(f"CLIP-4/{DP}", "waived"), reason="https://github.com/pytorch/pytorch/issues/1: local; off")
    right = case(f"PAR-1/{DP}", loss=deviation(1e-6))
    wrong = replace(case(f"PAR-1/{DP}", "fail", loss=deviation(1e-3)), reason="loss is <off>")
    older = report(right, waived, torch="2.13.0", suite_digest="a", coverage=report().coverage)
    return [older, report(wrong, waived, case(f"PAR-2/{TP}"), torch="2.14.0", suite_digest="a", exit_code=1)]


def test_columns_laws_and_findings() -> None:
    content = content_of(reports())
    assert [column.torch for column in content.columns] == ["2.13.0", "2.14.0"]
    by_law = {law.id: law for law in content.laws}
    assert by_law["PAR-1"].verdicts == [{"pass": 1}, {"fail": 1}]
    assert by_law["PAR-2"].verdicts == [{}, {"pass": 1}]
    assert by_law["PAR-2"].seconds == [None, 1.0]
    assert [(row.name, row.is_waived, [len(cases) for cases in row.cases]) for row in content.findings] == [
        ("loss is <off>", False, [0, 1]),
        ("https://github.com/pytorch/pytorch/issues/1: local", True, [1, 1]),
    ]
    assert content.data.verdicts == ["wp ", "wfp"]
    assert len(set(CODES.values())) == len(CODES)


def test_columns_are_in_the_order_of_versions() -> None:
    """A shell names 2.10 before 2.6; reports of one version stay in the order that is given."""
    given = [report(case(f"PAR-1/{DP}"), torch=torch, profile=profile) for torch, profile in _GIVEN]
    assert [(column.torch, column.profile) for column in content_of(given).columns] == [
        ("2.6.0", "pr"),
        ("2.10.0", "smoke"),
        ("2.10.0", "pr"),
    ]


def test_the_page_is_whole_loads_its_own_files_alone_and_escapes_texts() -> None:
    files = site_files(reports(), kill_matrix="| defect | <law> |")
    parser = Outline(files["index.html"])
    assert parser.open == []
    loaded = [link for link in parser.values("href", "src") if not link.startswith(("#", "https://github.com/"))]
    assert sorted(loaded) == ["data.js", "site.css", "site.js"]
    assert "loss is &lt;off&gt;" in files["index.html"]
    assert "&lt;law&gt;" in files["index.html"]
    assert "NOT CONFORMANT" in files["index.html"]
    data = json.loads(files["data.js"].removeprefix("const data = ").removesuffix(";\n"))
    assert data["pairs"][0]["counts"] == {"new-fail": 1, "new-case": 1}


def test_ten_versions_take_less_than_five_megabytes() -> None:
    cases = [case(f"PAR-{law}/{DP}-seed{seed}", loss=deviation(1e-6)) for law in range(1, 41) for seed in range(1, 81)]
    many = [report(*cases, torch=f"2.{minor}.0", suite_digest="a") for minor in range(6, 16)]
    assert sum(len(content.encode()) for content in site_files(many).values()) < MAX_BYTES


@pytest.mark.skipif(not shutil.which("node"), reason="no Node is installed")
@pytest.mark.parametrize(
    ("shown", "told"),
    [
        (f"#PAR-1/{DP}", ["2.13.0, 2 x Fake (gloo)", "pass", "why pass", "fail", "loss is <off>"]),
        ("#PAR-1@1", [f"PAR-1/{DP}", "fail", "loss is <off>", "It MUST."]),
        ("#nothing", []),
    ],
)
def test_the_script_shows_a_case_a_law_and_a_difference(tmp_path: Path, shown: str, told: list[str]) -> None:
    files = site_files(reports())
    script = tmp_path / "run.js"
    script.write_text(_STUB + files["data.js"] + files["site.js"].replace('"use strict";', "") + _PRINTED)
    done = subprocess.run(["node", script, shown], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert set(told) <= set(printed["chosen"])
    assert bool(printed["chosen"]) == bool(told)
    assert {"new-fail", f"PAR-1/{DP}"} <= set(printed["difference"])


def test_reports_of_different_suites_are_compared_with_a_caution() -> None:
    older, newer = reports()
    (pair,) = content_of([older, replace(newer, suite_digest="b")]).pairs
    assert pair.caution.startswith("judged by different versions of the suite")
    (pair,) = content_of([older, replace(newer, planned=9)]).pairs
    assert pair.caution.startswith("the second session ended early")
    assert pair.changes == []


def test_the_gravest_verdict_and_trends() -> None:
    assert gravest({"pass": 9, "waived": 1, "unsupported": 3}) == "waived"
    assert gravest({}) == ""
    assert trend([1.0, None], ["cpu", "cpu"]) == ""
    assert "<title>cpu 1 2</title>" in trend([1.0, None, 2.0], ["cpu"] * 3)
    both = trend([1.0, 8.0, 2.0, 8.0], ["cpu", "sim", "cpu", "sim"])
    assert "<title>cpu 1 2; sim 8 8</title>" in both
    assert (both.count("<polyline"), both.count("dasharray")) == (2, 1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, each in enumerate(reports()):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "report.json").write_bytes(msgspec.json.encode(each))
    out = tmp_path / "site" / "of"
    assert main(["site", str(out), str(tmp_path / "0"), str(tmp_path / "1")]) == 0
    assert f"written: {out / 'index.html'}: 2 reports" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {"index.html", "data.js", "site.js", "site.css"}
    assert main(["site", str(tmp_path / "0" / "report.json"), str(tmp_path / "0")]) == 4
    with pytest.raises(UsageError, match="no report is about the reference trainer"):
        content_of([])


def test_a_table_of_markdown_becomes_rows_with_links() -> None:
    assert table_rows("text\n\n| a | b |\n|---|---|\n| [x](https://y) | <z> |\n") == [
        ["a", "b"],
        ["[x](https://y)", "<z>"],
    ]
    assert table_rows("") == []
    assert with_links("a [x](https://y) <z>") == 'a <a href="https://y" rel="noreferrer">x</a> &lt;z&gt;'


def test_a_law_is_told_by_its_gravest_verdict() -> None:
    assert brief({"pass": 37, "fail": 3}) == "3 fail of 40"
    assert brief({"pass": 37, "unsupported": 3}) == "37 pass"
