"""Judgement of sweeps: a fault and a subject without a case fail, and a refusal does not."""

import pytest

from conformance.assertions.sweeps import require_no_wrong_result
from conformance.outcomes import ConformanceFailure
from conformance.sweeps.trials import Swept, Wrong

WRONG = Wrong(subject="mm", fault="result", kind="even shards", cases=2, example="S(0): 1, expected 2")


@pytest.mark.parametrize(
    ("swept", "message"),
    [
        (Swept(computed={"mm": 1, "glu": 0}, refused={"mm": 0, "glu": 1}), ""),
        (Swept(computed={"mm": 1, "glu": 0}, refused={"mm": 0, "glu": 0}), "glu: not tried: 1 layouts, expected 0"),
        (
            Swept(computed={"glu": 1, "mm": 0}, refused={"glu": 0, "mm": 0}, wrong=[WRONG]),
            "mm: result of even shards: 2",
        ),
    ],
    ids=["refused", "not tried", "wrong"],
)
def test_every_subject_is_tried_and_none_is_wrong(swept: Swept, message: str) -> None:
    if not message:
        require_no_wrong_result([swept, swept], unit="layouts")
        return
    with pytest.raises(ConformanceFailure, match=message):
        require_no_wrong_result([swept, swept], unit="layouts")
