"""The progress bar: it reaches its end, and is for terminals alone."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from tqdm import tqdm

from reference_trainer import progress
from reference_trainer.progress import LoadPlanner, SavePlanner


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What the bars write to, without a delay."""
    screen = Terminal()

    def shown(*args: Any, **kwargs: Any) -> Any:
        return tqdm(*args, **{**kwargs, "file": screen, "delay": 0.0, "mininterval": 0.0})

    monkeypatch.setattr(progress, "tqdm", shown)
    return screen


def test_items_are_counted(terminal: Terminal) -> None:
    assert list(progress.progress([1, 2, 3], title="load it")) == [1, 2, 3]
    assert "load it: 100%" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_planners_count_what_is_saved_and_loaded(terminal: Terminal, tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(3), "b": torch.zeros(2), "steps": 7}
    save(state, checkpoint_id=tmp_path, planner=SavePlanner(title="save it"), no_dist=True)
    loaded: dict[str, Any] = {"a": torch.zeros(3), "b": torch.ones(2), "steps": 0}
    load(loaded, checkpoint_id=tmp_path, planner=LoadPlanner(title="load it"), no_dist=True)
    assert loaded["steps"] == 7
    assert torch.equal(loaded["a"], state["a"])
    for title in ("save it", "load it"):
        assert f"{title}: 100%" in terminal.getvalue()


def test_without_a_terminal_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.progress([1, 2], title="load it")) == [1, 2]
    assert capsys.readouterr().err == ""
