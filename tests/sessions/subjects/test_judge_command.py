"""`python -m conformance judge`: a session about another trainer, and mistakes as one line and exit status 4."""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.judge.registry import asserted_laws
from conformance.plan.substrates import SIM
from conformance.subjects import subject
from conformance.subjects.protocol import reference_name
from tests.support import forked, warm_servers
from tests.support.subject_models import batch, loss

RIGHT = "tests.support.subject_models:right"


def judge(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command(directory, "judge", *arguments)


def command(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, forked.RANK_SERVERS_VARIABLE: warm_servers.address()}
    return forked.run("conformance", *arguments, cwd=directory, environment=environment)


def test_the_example_is_conformant_in_an_empty_directory(tmp_path: Path) -> None:
    """The two commands of docs/judge_your_trainer.md, on two cells, and `verify`; nightly tests have all cells.

    Faults are tried on two ranks, which show all but those of tensor parallelism; nightly tests try these.
    """
    assert "written: my_subject.py" in judge(tmp_path, "--init").stdout
    refused = judge(tmp_path, "--init")
    assert (refused.returncode, refused.stderr.strip()) == (
        4,
        "conformance: my_subject.py exists: give another name, or remove it",
    )
    tp = judge(tmp_path, "my_subject.py:parallelize", "--cells", "id = dp2-tp2-bf16mp-default-full", "--no-faults")
    assert tp.returncode == 0, tp.stdout + tp.stderr
    done = judge(tmp_path, "my_subject.py:parallelize", "--cells", "id = dp2-bf16mp-default-full")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "conformance-report" / "report.json").read_text())
    unsupported = {case["law"] for case in report["cases"] if case["verdict"] == "unsupported"}
    assert report["verdicts"].keys() == {"pass", "unsupported"}
    assert unsupported == {law for law, each in asserted_laws().items() if each.law.substrates == SIM}
    assert {case["id"].split("/")[1] for case in report["cases"]} == {"my_subject:parallelize"}
    assert "dp2-bf16mp-default-full" in {case["cell"] for case in report["cases"]}
    assert all(seen["laws"] for seen in report["trainer"]["faults"])
    assert (tmp_path / "conformance-report" / "report.html").exists()
    assert "CONFORMANT: " in done.stdout
    again = verified(tmp_path)
    assert (again.returncode, again.stdout) == (
        0,
        f"{len(report['cases'])} cases judged again from records, 0 problems\n",
    )


def test_a_wrong_trainer_fails_and_json_has_the_measured_numbers(tmp_path: Path) -> None:
    cells = ("--cells", "id = dp2-fp32-default-full or id = dp2-fp32-default-full-acc2")
    done = judge(tmp_path, "tests.support.subject_models:local_clip", *cells, "--no-faults", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    failing = {case["law"] for case in report["cases"] if case["verdict"] == "fail"}
    assert {"gradient-norm", "parameters"} <= failing
    assert report["trainer"]["faults"] == []
    assert {smallest["cell"] for smallest in report["smallest"]} <= {"dp2-fp32-default-full", "dp2-fp32-default-meta"}
    (norm,) = [c for c in report["cases"] if (c["law"], c["cell"]) == ("clipping", "dp2-fp32-default-full-acc2")]
    assert "--subject=tests.support.subject_models:local_clip" in norm["repro"]


def test_a_cell_that_hangs_ends_no_report_and_verify_agrees(tmp_path: Path) -> None:
    cells = "id in (dp2-fp32-default-full, dp2-bf16mp-default-full, hsdp2x2-fp32-default-full)"
    limits = ("--limit", "8", "--no-faults", "--cells", cells)
    done = judge(tmp_path, "tests.support.subject_models:hangs", *limits)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "conformance-report" / "report.json").read_text())
    verdicts = Counter((case["cell"], case["verdict"]) for case in report["cases"])
    assert verdicts["dp2-bf16mp-default-full", "timeout"] == 1
    others = {verdict for cell, verdict in verdicts if cell != "dp2-bf16mp-default-full"}
    assert others == {"pass", "unsupported"}  # of the cells, one is run before and one after it
    assert [cause["cells"] for cause in report["causes"]] == [["dp2-bf16mp-default-full"]]
    assert "the run hangs: rank 1 waits in no collective at tests/support/subject_models.py:" in done.stdout
    assert verified(tmp_path).returncode == 0


def verified(directory: Path) -> subprocess.CompletedProcess[str]:
    return command(directory, "verify", "conformance-report")


def test_a_trainer_that_raises_is_one_crash_of_a_cell_with_its_traceback(tmp_path: Path) -> None:
    cells = ("--cells", "id = dp2-fp32-default-full or id = dp2-fp32-default-full-acc2")
    done = judge(tmp_path, "tests.support.subject_mistakes:raises", *cells, "--no-faults")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "conformance-report" / "report.json").read_text())
    assert report["verdicts"].keys() == {"crash", "unsupported"}
    assert report["verdicts"]["crash"] == 2
    assert {case["law"] for case in report["cases"] if case["verdict"] == "crash"} == {"fsdp-is-on"}
    (cause,) = report["causes"]
    assert cause["traceback"].endswith(
        "    return options[\"warmup\"]\n           ~~~~~~~^^^^^^^^^^\nKeyError: 'warmup'"
    )
    assert "conformance/subjects" not in cause["traceback"]
    assert "| KeyError: 'warmup'" in done.stdout
    assert "did not run: cause 1" in done.stdout
    assert "KeyError" in (tmp_path / "conformance-report" / cause["log"]).read_text()
    again = verified(tmp_path)
    assert again.returncode == 0, again.stdout


def test_a_trainer_that_cannot_be_judged_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\nraise KeyError('settings')\n")
    done = judge(tmp_path, "broken.py:f")
    assert (done.returncode, done.stderr) == (4, "ERROR: rank 0 raised KeyError: 'settings' (broken.py:2)\n\n")


def test_cuda_without_a_device_is_one_line(tmp_path: Path) -> None:
    done = judge(tmp_path, RIGHT, "--accelerator", "cuda")
    expected = "ERROR: --accelerator cuda: no CUDA device is visible; check the driver and CUDA_VISIBLE_DEVICES\n\n"
    assert (done.returncode, done.stderr) == (4, expected)


def test_options_that_do_not_fit_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        assert main(["judge", *arguments]) == 4
        return capsys.readouterr().err

    assert "no subject: write MODULE:NAME" in refused()
    assert "--list judges nothing: leave out the subject" in refused("a:b", "--list")
    assert "--init judges nothing: leave out the subject" in refused("a:b", "--init")
    assert "give a name that ends in .py" in refused("--init", str(tmp_path / "x.txt"))


def test_a_function_of_other_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shard\(model\) cannot be called with \(model, mesh, config\)"):

        @subject(model=lambda: None, loss=loss, batch=batch)  # type: ignore[arg-type,return-value]
        def shard(model: object) -> None:
            pass


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"meshes": ["dp4"]}, r"meshes=\['dp4'\]: give a list of 'dp2', 'hsdp2x2', 'dp2-tp2'"),
        ({"precisions": "bf16"}, "precisions='bf16': give a list of 'fp32', 'bf16'"),
        ({"reduction": "max"}, "reduction='max': give 'mean' or 'sum'"),
        ({"loss": 3}, "loss= is a int: give a function"),
        ({"save": print}, "save= without load=, or load= without save=: give both, or neither"),
    ],
)
def test_options_of_the_decorator_are_checked(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        subject(**{"model": lambda: None, "loss": loss, "batch": batch, **options})  # type: ignore[arg-type]


def test_names_of_wrappers_are_taken_out_of_names() -> None:
    known = {"layers.0.weight", "module.bias"}
    assert reference_name("module._orig_mod.layers.0.weight", known) == "layers.0.weight"
    assert reference_name("module.bias", known) == "module.bias"
