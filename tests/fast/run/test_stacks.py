"""Dumps of stacks of ranks that hang: the thread that performs the task comes first."""

import pytest

from conformance.run.ranks.client import task_first

BAR = 'Thread 0x01 (most recent call first):\n  File "/x/tqdm/_monitor.py", line 69 in run\n'
HEARTBEAT = 'Thread 0x02 (most recent call first):\n  File "/x/heartbeat.py", line 3 in beat\n'
MAIN = 'hread 0x03 (most recent call first):\n  File "/x/train.py", line 12 in step\n'
FAULT = "Fatal Python error: Segmentation fault\n\n"


@pytest.mark.parametrize(
    ("dump", "expected"),
    [
        (f"{BAR}\n{HEARTBEAT}\nCurrent t{MAIN}", f"Current t{MAIN}\n{BAR}\n{HEARTBEAT}\n"),
        (f"{BAR}\nT{MAIN}", f"T{MAIN}\n{BAR}\n"),
        (f"{FAULT}Current t{MAIN}\n{BAR}", f"{FAULT}Current t{MAIN}\n{BAR}\n"),
        (f"Current t{MAIN}", f"Current t{MAIN}"),
        ("", ""),
    ],
    ids=["current", "oldest", "fault", "alone", "none"],
)
def test_the_task_comes_first(dump: str, expected: str) -> None:
    assert task_first(dump) == expected
