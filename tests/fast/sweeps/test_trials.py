"""Trials of sweeps: restriction to some subjects, and errors of ranks that have waited for others."""

from collections.abc import Mapping

import pytest
from torch.distributed.device_mesh import DeviceMesh

from conformance.outcomes import SweptOutcome
from conformance.sweeps.trials import Trials, select_samples


def test_a_sweep_without_the_subjects_tries_all() -> None:
    def of(*subjects: str) -> list[str]:
        return select_samples(["mean", "sum"], str, restricted_to=subjects)

    assert of() == of("Muon") == ["mean", "sum"]
    assert of("sum", "Muon") == ["sum"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (TypeError("got an unexpected keyword argument 'timeout'"), "refused"),
        (RuntimeError("Operator aten.poll.default with timeout does not have a sharding strategy"), "refused"),
        (RuntimeError("Timeout waiting for key: default_pg/0//cpu//0/1 after 500 ms"), "wrong"),
        (RuntimeError("Connect timeout [127.0.0.1]:1234"), "wrong"),
        (RuntimeError("Timed out waiting 500ms for recv operation to complete"), "wrong"),
        (RuntimeError("Application timeout caused pair closure"), "wrong"),
        (RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), "wrong"),
        (RuntimeError("wait timeout after 500ms, keys: /0"), "wrong"),
    ],
)
def test_a_rank_that_has_waited_refuses_nothing(mesh: DeviceMesh, error: Exception, outcome: SweptOutcome) -> None:
    def call(_mesh: DeviceMesh) -> Mapping[str, str]:
        raise error

    trials = Trials(mesh)
    trials.attempt("mean", "Shard(0)", "mean of 3 x 4", call)
    assert trials.swept.outcomes == {outcome: 1}
