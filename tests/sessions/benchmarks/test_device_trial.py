"""Trial of a device: stages, the screen, returned files, and the cells and defects of the calls."""

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device_trial import screen as results
from benchmarks.device_trial.calls import RACES, stages_of
from benchmarks.device_trial.screen import pack, screen
from benchmarks.device_trial.stages import Outcome, Stage, Trial
from conformance.defects.catalogue import defects
from conformance.detection.case_judge import the_matrix
from conformance.pytest_plugin.cases import cases_of


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def trial(directory: Path, *, total_s: float = 60.0) -> Trial:
    return Trial(directory, total_s, directory / "recipe.json")


# Stages


def test_values_and_ends_are_kept(tmp_path: Path) -> None:
    running = trial(tmp_path)
    running.run(Stage("good", program("print('width\\t3 mm'); print('noise')"), 20))
    running.run(Stage("bad", program("raise SystemExit(2)"), 20))
    running.run(Stage("bad as expected", program("raise SystemExit(2)"), 20, expected=[2]))
    states = [outcome.state for outcome in running.outcomes]
    assert states == ["expected", "exit status 2, expected 0", "expected"]
    assert running.outcomes[0].values == {"width": "3 mm"}
    assert json.loads((tmp_path / "outcomes.json").read_text())[1]["name"] == "bad"
    assert (tmp_path / "good.log").read_text() == "width\t3 mm\nnoise\n"


def test_what_means_nothing_without_a_stage_that_failed_is_not_run(tmp_path: Path) -> None:
    running = trial(tmp_path)
    for stage in (
        Stage("first", program("raise SystemExit(1)"), 20),
        Stage("second", program("pass"), 20, needs=["first"]),
        Stage("third", program("pass"), 20, needs=["second"]),
        Stage("other", program("pass"), 20),
    ):
        running.run(stage)
    assert [outcome.state for outcome in running.outcomes[1:]] == [
        "not run: it needs first",
        "not run: it needs second",
        "expected",
    ]


@pytest.mark.parametrize(("fills_the_rest", "state"), [(False, "cut off"), (True, "expected")])
def test_a_stage_is_cut_off_by_a_signal_that_lets_it_report(tmp_path: Path, fills_the_rest: bool, state: str) -> None:
    text = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('end\\treported', flush=True), sys.exit(1)))\n"
        "print('begin\\tnow', flush=True)\n"
        "time.sleep(60)\n"
    )
    running = trial(tmp_path)
    running.run(Stage("long", program(text), 2, fills_the_rest=fills_the_rest))
    assert running.outcomes[0].state == state
    assert running.outcomes[0].values == {"begin": "now", "end": "reported"}


def test_a_recipe_is_in_the_environment_of_the_stages_after_it(tmp_path: Path) -> None:
    text = "import os; print('cumem\\t' + os.environ.get('NCCL_CUMEM_ENABLE', 'unset'))"
    running = trial(tmp_path)
    running.run(Stage("before", program(text), 20))
    running.recipe.write_text('{"NCCL_CUMEM_ENABLE": "0"}')
    running.run(Stage("after", program(text), 20))
    assert [outcome.values["cumem"] for outcome in running.outcomes] == ["unset", "0"]


# Screen


def case(law: str, verdict: str, reason: str = "", cell: str = "c") -> dict[str, Any]:
    return {"id": f"{law}/{cell}", "law": law, "verdict": verdict, "reason": reason, "substrate": "nccl-shared"}


def reported(directory: Path, name: str, *cases: dict[str, Any]) -> Outcome:
    (directory / name).mkdir()
    (directory / name / "report.json").write_text(json.dumps({"cases": cases}))
    return Outcome(name, "expected", 1.0, {}, str(directory / name))


def test_the_screen_has_values_laws_failures_and_the_time_left(tmp_path: Path) -> None:
    outcomes = [
        Outcome("kernels", "expected", 3.25, {"products float32": "repeated yes"}),
        reported(
            tmp_path,
            "two-ranks",
            case("PAR-1", "pass"),
            case("PAR-1", "pass", cell="d"),
            case("ENV-1", "pass"),
            case("PAR-2", "fail", "deviation 3, bound 0\nmore"),
        ),
        reported(tmp_path, "race-of-streams", case("STREAM-5", "fail", "bits differ, as they must")),
    ]
    lines = screen(outcomes, left_s=12.4).splitlines()
    assert lines[0].split() == ["kernels", "3.2", "s", "expected"]
    assert "  products float32: repeated yes" in lines
    assert "nccl-shared pass: ENV-1, PAR-1 x2" in lines
    assert "fail PAR-2/c: deviation 3, bound 0" in lines
    assert not [line for line in lines if "as they must" in line]
    assert lines[-1] == "12 s left"


# What comes back


def test_few_files_in_one_folder_come_back(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    record = work / "two-ranks" / "records" / "cell--digest"
    record.mkdir(parents=True)
    for file in ("screen.txt", "outcomes.json", "recipe.json", "kernels.log", "allocator_history.pickle"):
        (work / file).write_text(file)
    for file in ("record.json", "rank0.safetensors", "snapshot-rank0.pickle", "lock"):
        (record / file).write_text(file)
    (work / "two-ranks" / "report.json").write_text("{}")
    (work / "two-ranks" / "report.html").write_text("large")
    files = pack(work, out, call="first")
    assert sorted(out.iterdir()) == sorted(files)
    assert len(files) <= 8
    with tarfile.open(out / "first-reports.tgz") as archive:
        names = set(archive.getnames())
    assert names == {
        "two-ranks/report.json",
        "two-ranks/records/cell--digest/record.json",
        "two-ranks/records/cell--digest/snapshot-rank0.pickle",
    }


def test_what_is_too_large_is_told_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_FILE_BYTES", 100)
    work = tmp_path / "work"
    work.mkdir()
    (work / "kernels.log").write_bytes(bytes(range(256)) * 100)
    (note,) = pack(work, tmp_path / "out", call="first")
    assert note.name == "first-logs.too-large.txt"
    assert "more than 100" in note.read_text()


# Calls


def options(stage: Stage) -> dict[str, str]:
    command = list(stage.command)
    return {name: command[index + 1] for index, name in enumerate(command[:-1]) if name.startswith("--")}


@pytest.mark.parametrize("call", ["first", "second"])
@pytest.mark.parametrize("accelerator", ["cuda", "cpu", "sim"])
def test_every_session_has_cases(call: str, accelerator: str, tmp_path: Path) -> None:
    """Cells are of the matrix, or named alone; a session without any case would be a stage that tells nothing."""
    matrix = the_matrix()
    sessions = [stage for stage in stages_of(call, accelerator=accelerator, work=tmp_path) if stage.report]
    assert sessions
    for stage in sessions:
        selected = options(stage).get("--cells")
        if selected and selected.startswith("id in ("):
            assert set(selected[7:-1].split(", ")) <= matrix.cells.keys()
        elif selected:
            assert selected in matrix.cells or cases_of(selected, matrix, seed=0)
        assert options(stage)["--accelerator"] == accelerator
        assert "conformance.pytest_plugin.plugin" in stage.command


def test_races_are_tried_on_the_cells_of_the_catalogue(tmp_path: Path) -> None:
    """An offload that is not pinned makes the host wait, and no race could be seen."""
    cells = {defect.id: defect.cells for defect in defects()}
    stages = {stage.name: stage for stage in stages_of("second", accelerator="cuda", work=tmp_path)}
    for race in RACES:
        stage = stages[f"race-{race}"]
        assert options(stage)["--cells"] in cells[race]
        assert options(stage)["--defect"] == race
        assert stage.expected == (1,)
    assert options(stages["race-offload-source-released"])["--cells"].endswith("-offloadcpu-pinned")
