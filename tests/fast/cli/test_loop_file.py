"""Files that `judge --init --loop FILE.py:NAME` writes: they parse, and name the trainer's model and optimizer."""

import ast
import shutil
from pathlib import Path

import pytest

from conformance.cli.loop_file import write_for
from reference_trainer.checks import UsageError
from tests.support import plain_script

TRAINER = """
class Trainer:
    def __init__(self, model, mesh, grad_clip=1.0):
        self.optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.95))

    def train_step(self, micro_batches):
        pass
"""


def written(directory: Path, text: str, name: str) -> str:
    file = directory / "my_train.py"
    file.write_text(text)
    target, subject = write_for(f"{file}:{name}")
    assert subject == f"{target}:train"
    ast.parse(target.read_text())
    return target.read_text()


def test_a_script_leaves_batch_and_loss_to_say(tmp_path: Path) -> None:
    shutil.copy(plain_script.__file__, tmp_path / "source.py")
    text = written(tmp_path, (tmp_path / "source.py").read_text(), "main")
    assert "model=my_train.Net," in text
    assert "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.001, weight_decay=0.1)," in text
    assert 'accumulation="even",' in text
    assert "return my_train.main(max_norm=config.max_norm, accumulation=config.accumulation)" in text
    assert text.count("FILL IN") == 2


def test_a_class_is_made_once_and_takes_steps(tmp_path: Path) -> None:
    text = written(tmp_path, TRAINER, "Trainer")
    assert (
        "trainer = my_train.Trainer(model=config.model(), mesh=config.device_mesh(), grad_clip=config.max_norm)" in text
    )
    assert "yield trainer.train_step(micro_batches)" in text
    assert "torch.optim.Adam(parameters, betas=(0.9, 0.95))" in text


@pytest.mark.parametrize(
    ("trainer", "problem"),
    [
        ("my_train:main", "give FILE.py:NAME"),
        ("nowhere.py:main", "no file nowhere.py"),
    ],
)
def test_wrong_names_are_told(trainer: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        write_for(trainer)


def test_nothing_is_written_for_a_name_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"my_train.py has no `main`; functions and classes there: Trainer"):
        written(tmp_path, TRAINER, "main")
    assert [file.name for file in tmp_path.iterdir()] == ["my_train.py"]
