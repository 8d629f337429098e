"""Restriction of sweeps to some of their subjects."""

import pytest

from conformance.experiments.trials import End, _ends, tried, trying_only
from tests.one_rank import world_of_one_rank


def test_a_sweep_without_the_subjects_tries_all() -> None:
    def of(*subjects: str) -> list[str]:
        with trying_only(frozenset(subjects)):
            return tried(["mean", "sum"], str)

    assert of() == of("Muon") == ["mean", "sum"]
    assert of("sum", "Muon") == ["sum"]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 500ms for recv operation to complete",
            "WAITED",
        ),
        ("[../gloo/transport/tcp/pair.cc:525] Application timeout caused pair closure", "WAITED"),
        ("wait timeout after 500ms, keys: /default_pg/0//cpu//0/1", "WAITED"),
        ("Timeout waiting for key: default_pg/0//cpu//0/1 after 500 ms", "WAITED"),
        ("Connect timeout [127.0.0.1]:1234", "WAITED"),
        ("add() got an unexpected keyword argument 'timeout'", "ERROR"),
        ("Operator aten.poll.default with timeout does not have a sharding strategy registered.", "ERROR"),
    ],
)
def test_a_refusal_that_speaks_of_a_timeout_has_not_waited_for_a_peer(error: str, end: str) -> None:
    with world_of_one_rank():
        assert _ends(RuntimeError(error), {}) == [End[end]]
