"""`python -m conformance judge`: the example that it writes, its JSON, and mistakes as one line and exit status 4."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.project import PROJECT
from conformance.run.pool import Pools
from conformance.subjects import subject
from conformance.subjects.judging import judge_subject
from conformance.subjects.protocol import reference_name
from conformance.subjects.running import SubjectRuns
from tests.support.subject_models import batch, loss


def judge(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["judge", *arguments])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_the_example_is_conformant_in_an_empty_directory(tmp_path: Path) -> None:
    """The two commands of docs/judge_your_trainer.md, as they stand there."""
    variables = {**os.environ, "PYTHONPATH": str(PROJECT)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "conformance", "judge", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120, check=False
        )

    assert "written: my_subject.py" in run("--init").stdout
    refused = run("--init")
    assert (refused.returncode, refused.stderr.strip()) == (
        4,
        "conformance: my_subject.py exists: give another name, or remove it",
    )
    done = run("my_subject.py:parallelize")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dp2-tp2-bf16" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("conformant: ")
    assert "unsupported" not in done.stdout


def test_json_has_verdicts_with_measured_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("tests.support.subject_models:right", "--cells", "dp2-fp32", "--no-faults", "--json")
    status, text = judge(capsys, *arguments)
    report = json.loads(text)
    assert status == 0
    assert report["faults"] == []
    assert {entry["cell"] for entry in report["verdicts"]} == {"tests.support.subject_models:right/dp2-fp32"}
    (gradients,) = [entry for entry in report["verdicts"] if entry["law"] == "gradients"]
    metric = gradients["measured"]["gradient at step 0"]
    assert 0 < metric["value"] < metric["upper"] < 1e-4
    assert metric["formula"] == "factor max(own, overall, u)"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tests.support.nowhere:right", "no module `tests.support.nowhere` for tests.support.nowhere:right"),
        ("nowhere.py:right", "no file nowhere.py"),
        ("tests.support.subject_models:wrong", "tests.support.subject_models has no `wrong`; subjects there: right, "),
        ("tests.support.subject_models:not_decorated", "decorate parallelize(model, mesh, config) with"),
        ("tests.support.subject_models:no_module", "model= returned a int: give a function that returns an nn.Module"),
        ("tests.support.subject_models:dropout", "switch dropout off"),
        (
            "tests.support.subject_models:vector_loss",
            "loss() returned a Tensor of shape (6, 8): return a scalar tensor",
        ),
        ("tests.support.subject_models:wrong_batch", "batch() returned a tuple with tensors of shapes [(2,), (3,)]"),
    ],
)
def test_mistakes_are_one_line(pools: Pools, tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as raised:
        judge_subject(SubjectRuns(name, pools, tmp_path))
    assert "\n" not in str(raised.value)


def test_a_module_that_raises_is_told_with_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("x = 1\nraise KeyError('settings')\n")
    assert judge(capsys, f"{file}:f") == (4, "conformance: rank 0 raised KeyError: 'settings' (broken.py:2)\n")


def test_options_that_do_not_fit_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "(did you mean `dp2-fp32`?)" in judge(capsys, "a:b", "--cells", "dp2-fp23")[1]
    assert "no subject: write MODULE:NAME" in judge(capsys)[1]
    assert "--list judges nothing: leave out the subject" in judge(capsys, "a:b", "--list")[1]
    assert "--init judges nothing: leave out the subject" in judge(capsys, "a:b", "--init")[1]
    assert "give a name that ends in .py" in judge(capsys, "--init", str(tmp_path / "x.txt"))[1]


def test_cells_may_be_named_as_in_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    name = "tests.support.subject_models:right"
    status, text = judge(capsys, name, "--cells", f"{name}/dp2-fp32", "--no-faults")
    assert status == 0, text
    problem = f"conformance: --cells names cells of fabric: the subject is {name}\n"
    assert judge(capsys, name, "--cells", "fabric/dp2-fp32") == (4, problem)


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
