"""Defects that the shares of sweeps in `smoke` miss: judged without their subjects, as a fault of torch would be.

`python -m tests.support.sweep_shares` writes the list that tests read, which takes minutes.
"""

import importlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from conformance.defects.catalogue import defects
from conformance.detection.case_judge import CaseJudge, judge_case, the_matrix
from conformance.experiments import context as experiments_context
from conformance.judge.verdicts import Verdict
from conformance.run.pool import Pools
from conformance.run.ranks.messages import RankContext, Task
from conformance.run.record import read_record

LOST_FILE = Path(__file__).with_name("lost_in_shares.json")
DEADLINE_S = 120.0
PROFILE = "smoke"
_MODULE = "tests.support.sweep_shares"  # also where it runs as `__main__`


def lost_in_shares() -> list[str]:
    """Return the ids of the defects that the list names."""
    ids: list[str] = json.loads(LOST_FILE.read_text())
    return ids


class UnnamedSubjects(Pools):
    """Pools whose sweeps do not know which subjects a defect names."""

    def run(self, task: Task, **options: Any) -> list[Any]:
        """Run a task, without the subjects if it is a sweep."""
        if ".sweeps." in task.function:
            payload = {"experiment": task.function, "job": task.payload}
            task = msgspec.structs.replace(task, function=f"{_MODULE}:without_subjects", payload=payload)
        return super().run(task, **options)


def without_subjects(context: RankContext, payload: dict[str, Any]) -> Any:
    """Perform a sweep with a defect of which it does not know the subjects."""
    module, _, name = payload["experiment"].partition(":")
    with patch.object(experiments_context, "subjects_of", lambda _: frozenset()):
        return getattr(importlib.import_module(module), name)(context, payload["job"])


def lost(judge: CaseJudge) -> Iterator[str]:
    """Yield the defects that name subjects, and that no case of the profile shows since it has drawn a share."""
    share = the_matrix().profile(PROFILE).sweep_share
    for defect in defects():
        cases = judge.cases(defect.cells, only=defect.laws) if defect.subjects else []
        store = judge.store(defect=defect.id, deadline_s=DEADLINE_S)
        store.sweep_share = share
        judged = [judge_case(case, store) for case in cases]
        if errors := [each.reason for each in judged if each.verdict == Verdict.ERROR]:
            raise RuntimeError(f"{defect.id}: {errors[0]}")
        is_shown = any(each.verdict in (Verdict.FAIL, Verdict.CRASH) for each in judged)
        if not is_shown and any(_is_share(store.directory / name) for each in judged for name in each.records):
            yield defect.id


def _is_share(record: Path) -> bool:
    found = read_record(record)
    return found is not None and found.header.sweep_share < 1.0


def main() -> None:
    """Write the list."""
    with UnnamedSubjects() as pools, tempfile.TemporaryDirectory() as directory:
        ids = sorted(lost(CaseJudge(Path(directory), pools, profile=PROFILE)))
    LOST_FILE.write_text(json.dumps(ids, indent=1) + "\n")


if __name__ == "__main__":
    main()
