"""The kill matrix itself: escapes, false alarms, laws that kill no defect, and results that are reused."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.__main__ import main
from conformance.defects.catalogue import defects, injected, require_known
from conformance.detection import kill_matrix as module
from conformance.detection.case_judge import CaseJudge
from conformance.detection.kill_matrix import KillMatrix, as_markdown, as_text, kill_matrix
from conformance.detection.trials import LawTrial, Trial, key_of, try_defect
from conformance.numerics.arithmetic import Arithmetic
from conformance.run.pool import Pools

KILLED = LawTrial(cells=2, kills=("dp2",), margin=40.0, reason="too far", twin_failures=(), twin_margin=0.25)
ESCAPED = msgspec.structs.replace(KILLED, kills=(), margin=None, reason="")
ALARMED = msgspec.structs.replace(KILLED, twin_failures=("dp2: fail: too far",))
BY_ID = {defect.id: defect for defect in defects()}
CHEAP = "optimizer-stale-params"
"""A defect with one cell."""


def matrix_of(*trials: Trial, complete: bool = False) -> KillMatrix:
    return KillMatrix(profile="pr", torch="2.13.0", trials=list(trials), unverified=["x"], complete=complete)


def trial(law: LawTrial, *, others: tuple[str, ...] = ()) -> Trial:
    return Trial(defect="grads-summed", key="k", seconds=1.0, laws={"PAR-1": law}, caught_by_others=others)


def test_problems() -> None:
    assert matrix_of(trial(KILLED)).problems == []
    assert matrix_of(trial(ESCAPED, others=("PAR-9",))).problems == [
        "grads-summed escapes PAR-1: it passes; caught by PAR-9 instead"
    ]
    assert matrix_of(trial(ALARMED)).problems == ["grads-summed.twin fails PAR-1: dp2: fail: too far"]


def test_a_law_that_kills_no_defect_is_a_problem_of_the_whole_catalogue() -> None:
    problems = matrix_of(trial(KILLED), complete=True).problems
    assert "PAR-2 kills no defect: no defect proves that it can fail" in problems
    assert not any(problem.startswith("PAR-1 ") for problem in problems)


def test_text_and_markdown() -> None:
    matrix = matrix_of(trial(KILLED), trial(ESCAPED))
    for text in (as_text(matrix), as_markdown(matrix)):
        assert "1 of 2 defects caught by all laws that they name, 2 of 2 twins pass, 1 law, 0 laws" in text
        assert all(word in text for word in ("40", "25%", "grads-summed escapes PAR-1: it passes"))


@pytest.fixture(scope="module")
def case_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseJudge]:
    with Pools() as pools:
        yield CaseJudge(tmp_path_factory.mktemp("records"), pools)


def test_a_law_without_a_case_in_the_profile_is_judged_on_the_first_cell_of_the_matrix(case_judge: CaseJudge) -> None:
    defect = BY_ID["wrap-granularity"]
    smoke = CaseJudge(case_judge.directory, case_judge.pools, profile="smoke")
    for judge in (case_judge, smoke):
        assert {case.law for case in judge.cases_of(defect.cells, defect.laws)} == set(defect.laws)
    (case,) = smoke.cases_of("world = 8 and features = 0 and tp = 1 and dp_replicate = 2", ["PAR-1"])
    assert case.cell.mesh == "hsdp2x4"


@pytest.mark.parametrize(("inject", "twin"), [(f"{CHEAP}.twin", CHEAP), (f"{CHEAP}.twin",) * 2])
def test_a_defect_that_does_nothing_escapes_and_a_wrong_twin_fails(
    case_judge: CaseJudge, monkeypatch: pytest.MonkeyPatch, inject: str, twin: str
) -> None:
    """Names of the real catalogue, which the ranks inject, in wrong places."""
    real, judge = BY_ID[CHEAP], case_judge.judge
    names = {CHEAP: inject, f"{CHEAP}.twin": twin}
    monkeypatch.setattr(
        case_judge, "judge", lambda cases, *, defect, **options: judge(cases, defect=names[defect], **options)
    )
    trial = try_defect(case_judge, real)
    assert trial.escapes == real.laws
    assert trial.false_alarms == (real.laws if twin == CHEAP else ())


@pytest.mark.parametrize(
    ("error", "symptom", "is_caught"),
    [
        ("RuntimeError('torch refuses')", "", False),
        ("RuntimeError('torch refuses')", "ValueError", False),
        ("RuntimeError('torch refuses')", "RuntimeError", True),
        ("NameError('name x is not defined')", "", False),
    ],
)
def test_a_run_that_merely_raises_is_no_kill(
    case_judge: CaseJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, symptom: str, is_caught: bool
) -> None:
    """The exception comes from a file of torch, as that of an edited statement does."""
    source = f"def step(*_, **__):\n    raise {error}\n"
    (tmp_path / "raising.py").write_text(
        "import torch\n"
        "from conformance.defects.injection import replaced\n"
        "names = {}\n"
        f"exec(compile({source!r}, torch.__file__, 'exec'), names)\n"
        "def fault():\n"
        "    return replaced('torch.optim:AdamW', 'step', lambda _: names['step'])\n"
    )
    real, judge = BY_ID[CHEAP], case_judge.judge
    names = {CHEAP: f"{tmp_path / 'raising.py'}:fault", f"{CHEAP}.twin": f"{CHEAP}.twin"}
    monkeypatch.setattr(
        case_judge, "judge", lambda cases, *, defect, **options: judge(cases, defect=names[defect], **options)
    )
    monkeypatch.setattr("conformance.detection.trials.key_of", lambda *_, **__: "a defect that is in no file")
    trial = try_defect(case_judge, replace(real, raises=symptom))
    assert all(error.split("(")[0] in law.reason for law in trial.laws.values()), trial
    assert trial.escapes == (() if is_caught else real.laws)


def test_a_twin_that_a_waiver_excuses_has_a_margin_that_json_can_hold(case_judge: CaseJudge) -> None:
    """API-2 has known faults of torch, whose metrics are infinitely far outside of their bounds."""
    trial = try_defect(case_judge, BY_ID["reset-leaves-unsharded"])
    assert trial.escapes == trial.false_alarms == ()
    assert msgspec.json.decode(msgspec.json.encode(trial), type=Trial) == trial


def test_results_are_reused_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fake(missing: Any, *, profile: str, workers: int, arithmetic: Arithmetic) -> Iterator[Trial]:
        for defect in missing:
            tried.append(defect.id)
            key = key_of(defect, profile=profile, arithmetic=arithmetic)
            yield Trial(defect=defect.id, key=key, seconds=0.0, laws={"PAR-1": KILLED})

    monkeypatch.setattr(module, "_try_all", fake)
    both = ("grads-summed", "rope-buffer-uninit")
    assert kill_matrix(profile="pr", directory=tmp_path, workers=1, only=both[:1]).reused == 0
    assert kill_matrix(profile="pr", directory=tmp_path, workers=1, only=both).reused == 1
    assert kill_matrix(profile="pr", directory=tmp_path, workers=1, only=both).reused == 2
    assert kill_matrix(profile="smoke", directory=tmp_path, workers=1, only=both[:1]).reused == 0
    assert tried == ["grads-summed", "rope-buffer-uninit", "grads-summed"]
    assert {row["defect"] for row in json.loads((tmp_path / "kill_matrix.json").read_text())["trials"]} == set(both)
    (tmp_path / "kill_matrix.json").write_text("{")
    assert kill_matrix(profile="pr", directory=tmp_path, workers=1, only=both[:1]).reused == 0


def test_the_key_depends_on_the_defect_the_profile_and_the_arithmetic() -> None:
    first, second = BY_ID["grads-summed"], BY_ID["rope-buffer-uninit"]
    other = key_of(first, profile="pr", arithmetic=Arithmetic(kernels="other:1"))
    keys = {key_of(first, profile="pr"), key_of(first, profile="smoke"), key_of(second, profile="pr"), other}
    assert len(keys) == 4
    assert key_of(first, profile="pr") in keys


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["defects", "optimizer-stale-params", "--workers", "1", "--report-dir", str(tmp_path)]
    assert main(command) == 0
    assert "1 of 1 defect caught by all laws that they name, 1 of 1 twin pass" in capsys.readouterr().out
    assert main(command) == 0
    assert "1 trial reused" in capsys.readouterr().out


# Defects of users

FILE = """
from contextlib import contextmanager
from conformance.defects.injection import defect, replaced
def only_first(original):
    return lambda parameters, **options: original(list(parameters)[:1], **options)
@contextmanager
def clips_one():
    with replaced("reference_trainer.train", "clip_gradients", only_first):
        yield
@defect("", "", "https://pytorch.org")
def mine(benign):
    return clips_one()
NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "my_faults.py"
    file.write_text(FILE)
    return file


@pytest.mark.parametrize("name", ["clips_one", "mine", "mine.twin"])
def test_a_users_defect_is_injected(file: Path, name: str) -> None:
    functions = vars(importlib.import_module("reference_trainer.train"))
    before = functions["clip_gradients"]
    with injected(require_known(f"{file}:{name}")):
        assert functions["clip_gradients"] is not before
    assert functions["clip_gradients"] is before


def test_a_users_defect_is_caught(file: Path, case_judge: CaseJudge) -> None:
    cases = case_judge.cases("id = dp2-fp32-default-meta-clip0.1", only=("CLIP-1",))
    (judged,) = case_judge.judge(cases, defect=f"{file}:clips_one")
    assert judged.verdict == "fail"
