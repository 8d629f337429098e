"""`python -m conformance`: the output of its commands; its mistakes are in wrong_inputs.txt."""

import re
import subprocess
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from conformance.__main__ import main
from conformance.cli.show import show
from conformance.defects.catalogue import defects
from conformance.detection.case_judge import the_matrix
from conformance.judge.registry import asserted_laws
from conformance.plan.cells import Cell
from conformance.project import PROJECT
from reference_trainer.config import load_config
from tests.support.matrices import write_matrix
from tests.support.programs import output_of

MATRIX = """\
schema: 2
axes: {mesh: [dp2, tp2]}
cells:
  modes: {note: two modes, axes: {mesh: [dp2, tp2], reshard: [default, never]}}
exclusions:
  - {when: mesh = tp2 and reshard = never, reason: one rank holds all, reference: nowhere}
profiles:
  smoke: {note: small, must: [modes], cells: mesh = dp2, deadline_s: 60}
  pr: {note: all, must: [modes], deadline_s: 60}
"""


@pytest.fixture
def matrix(tmp_path: Path) -> str:
    return f"--matrix={write_matrix(tmp_path / 'matrix.yaml', MATRIX)}"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_list_shows_cells_with_their_laws_and_what_is_excluded(capsys: pytest.CaptureFixture[str], matrix: str) -> None:
    assert_expected_inline(
        printed(capsys, "list", matrix, "--laws=PAR-1,PAR-5"),
        """\
cell                     ranks    laws
---------------------  -------  ------  ------------
dp2-fp32-default-meta        2       2  PAR-1, PAR-5
dp2-fp32-never-meta          2       2  PAR-1, PAR-5
tp2-fp32-default-meta        2       2  PAR-1, PAR-5

profile pr: 6 cases on 3 cells, 11 s on the machine of matrix.lock, with all laws of the cells

excluded cells                  reason
------------------------------  ------------------
mesh = tp2 and reshard = never  one rank holds all
""",
    )


def test_profile_and_cells_select_cases(capsys: pytest.CaptureFixture[str], matrix: str) -> None:
    laws = "--laws=PAR-1,PAR-5"
    cases = printed(capsys, "list", matrix, "--profile=smoke", laws, "--cases")
    assert len(cases.splitlines()) == 4
    cases = printed(capsys, "list", matrix, "--profile=smoke", "--cells=reshard = never", laws, "--cases")
    assert cases.splitlines() == ["PAR-1/dp2-fp32-never-meta", "PAR-5/dp2-fp32-never-meta"]
    cases = printed(capsys, "list", matrix, "--cells=dp2-fp32-never-meta", "--laws=par-5", "--cases")
    assert cases.splitlines() == ["PAR-5/dp2-fp32-never-meta"]


def test_show_law(capsys: pytest.CaptureFixture[str], matrix: str) -> None:
    lines = printed(capsys, "show", matrix, "par-5").splitlines()
    assert lines[0].startswith("PAR-5  Ranks that hold the same elements of a parameter, gradient, buffer or moment ")
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in lines[2:])
    assert facts["since"] == "torch 2.6"
    assert re.fullmatch(r"conformance/laws/numerics/test_par.py:\d+ test_replicas_are_equal", facts["asserted in"])
    assert (facts["where"], facts["cases"]) == ("world > 1", "2 in smoke, 3 in pr")
    assert "replica-desync" in facts["must catch"].split(", ")


def test_show_cell_is_a_configuration_of_the_trainer(
    capsys: pytest.CaptureFixture[str], matrix: str, tmp_path: Path
) -> None:
    text = printed(capsys, "show", matrix, "dp2-fp32-never-meta")
    file = tmp_path / "cell.yaml"
    file.write_text(text)
    assert load_config(file) == Cell(mesh="dp2", reshard="never").config
    assert re.search(r"^# laws in smoke +\S.*, PAR-1, .*PAR-5, ", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["replica-desync", "replica-desync.twin", "Replica-Desync"])
def test_show_defect(capsys: pytest.CaptureFixture[str], name: str) -> None:
    lines = printed(capsys, "show", name).splitlines()
    cell = "hsdp2x2-fp32-default-meta"
    command = f"pytest conformance/ --laws INIT-2 --cells {cell} --defect replica-desync"
    assert lines[0].startswith("replica-desync  Replicas start from different weights")
    assert {re.sub(r"  +", ": ", line) for line in lines} >= {
        "caught by: INIT-2, PAR-1, PAR-5",
        f"smallest cells: {cell}: INIT-2, PAR-1, PAR-5",
        f"inject: {command}",
        f"benign twin: {command}.twin",
        "shows on: gloo, sim, nccl-shared, nccl, from torch 2.6 on",
    }


def test_a_defect_that_only_devices_show(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "show", "record-stream-on-collectives")
    assert "shows on        sim, nccl-shared, nccl, from torch 2.6 on\n" in text
    assert "--defect record-stream-on-collectives --accelerator sim\n" in text


def test_all_ids_of_the_project_can_be_shown() -> None:
    matrix = the_matrix()
    cells = {case.cell.id for profile in matrix.profiles for case in matrix.cases(profile)}
    assert asserted_laws().keys() >= set(matrix.laws())
    for name in [*matrix.laws(), *(defect.id for defect in defects()), min(cells)]:
        assert name in show(matrix, name).splitlines()[0]


def test_what_docs_hold_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    docs = PROJECT / "docs"
    laws = printed(capsys, "laws")
    assert all(f"\n| {law} " in laws for law in asserted_laws())
    assert printed(capsys, "schema") == (docs / "report.schema.json").read_text()
    assert printed(capsys, "schema", "--line") == (docs / "report_line.schema.json").read_text()


def test_the_help_names_each_command_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    groups, _, listed = capsys.readouterr().out.partition("positional arguments:")
    commands = re.findall(r"^    (\w+)  ", listed, flags=re.MULTILINE)
    assert "Commands besides running the suite with pytest:" in groups
    assert commands
    assert all(re.search(rf"\b{command}\b", groups) for command in commands)


def test_ctrl_c_ends_with_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("conformance.cli.laws.run", interrupt)
    assert main(["laws"]) == 130
    assert capsys.readouterr().err == "conformance: interrupted\n"


# Other processes


def test_listing_and_sessions_do_not_load_torch() -> None:
    program = (
        "import sys, conformance.pytest_plugin.session, conformance.report.html, conformance.__main__ as main; "
        "import reference_trainer.precision; from conformance.defects.catalogue import signatures; signatures(); "
        "assert main.main(['list', '--profile', 'smoke']) == 0; sys.exit('torch' in sys.modules)"
    )
    output_of("-c", program)


COMPLETE = """
source "$1"
COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
_shtab_conformance
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["de"], ["defects"]),
        (["ver"], ["verify", "versions"]),
        (["list", "--pro"], ["--profile"]),
        (["schema", "--"], ["--help", "--line"]),
    ],
)
def test_bash_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], completions: list[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--print-completion", "bash"])
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    command = ["bash", "-c", COMPLETE, "bash", str(script), "conformance", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(done.stdout.split()) == completions, done.stderr
