"""The rank that failed first, found from reports alone."""

import math
from typing import Any

import pytest

from conformance.run.failures import find_cause, waits_for_peers
from conformance.run.ranks.messages import RankReport


def report(rank: int, state: Any, stamp_s: float = math.inf, **details: Any) -> RankReport:
    return RankReport(rank=rank, state=state, stamp_s=stamp_s, **details)


def lost(rank: int, stamp_s: float) -> RankReport:
    return report(rank, "raised", stamp_s, exception_type="RuntimeError", message="Connection closed by peer [::1]:5")


WAITING = 'Current thread 0x1 (most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 1 in f'
BUSY = 'Current thread 0x1 (most recent call first):\n  File "/x/model.py", line 1 in f'


@pytest.mark.parametrize(
    ("ranks", "first_rank", "kind"),
    [
        pytest.param([lost(0, 1.0), report(1, "died", 2.0)], 1, "crash", id="a-death-beats-complaints"),
        pytest.param(
            [report(0, "raised", 1.0, exception_type="ValueError"), report(1, "died", 2.0)],
            0,
            "raised",
            id="an-earlier-error-beats-a-death",
        ),
        pytest.param(
            [report(0, "raised", 3.0, exception_type="ValueError"), report(1, "died", 2.0)],
            1,
            "crash",
            id="a-death-beats-a-later-error",
        ),
        pytest.param(
            [lost(0, 1.0), report(1, "raised", 2.0, exception_type="ValueError")],
            1,
            "raised",
            id="an-error-beats-complaints",
        ),
        pytest.param([lost(0, 2.0), lost(1, 1.0)], 1, "raised", id="only-complaints"),
        pytest.param([lost(0, 2.0), report(1, "hung", stack=WAITING)], 0, "raised", id="a-waiting-peer-is-no-cause"),
        pytest.param([lost(0, 2.0), report(1, "hung", stack=BUSY)], 1, "timeout", id="a-peer-that-never-answered"),
        pytest.param([report(0, "hung", stack=WAITING), report(1, "hung", stack=BUSY)], 1, "timeout", id="all-hung"),
    ],
)
def test_find_cause_names_the_rank_that_failed_first(ranks: list[RankReport], first_rank: int, kind: str) -> None:
    failure = find_cause(ranks, deadline_s=5)
    assert (failure.first_rank, failure.kind) == (first_rank, kind)


def test_waits_for_peers_looks_at_innermost_frames_only() -> None:
    frames = [f'  File "/x/model.py", line {line} in f' for line in range(3)]
    assert not waits_for_peers("\n".join(["Thread 0x1 (most recent call first):", *frames, WAITING.split("\n")[1]]))
    assert waits_for_peers("\n".join(["Thread 0x1 (most recent call first):", *frames, WAITING]))


def test_waits_for_peers_sees_through_the_dispatch_tap() -> None:
    """Otherwise a waiting rank would be blamed for the hang of another rank."""

    def stack(*files: str) -> str:
        return "\n".join(["Thread 0x1 (most recent call first):", *(f'  File "{f}", line 1 in f' for f in files)])

    tap = ["/x/torch/_ops.py", "/y/conformance/instruments/dispatch_tap.py", "/x/torch/_dynamo/eval_frame.py"]
    tap += ["/x/torch/_compile.py", "/x/torch/_library/autograd.py", "/x/torch/_ops.py"]
    assert waits_for_peers(stack(*tap, "/x/torch/distributed/_functional_collectives.py"))
    assert not waits_for_peers(stack(*tap, *["/x/model.py"] * 3, "/x/torch/distributed/fsdp/_fsdp_state.py"))
