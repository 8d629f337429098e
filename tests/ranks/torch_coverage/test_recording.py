import threading
import uuid
from functools import partial
from pathlib import Path

import torch
from torch import nn

from conformance.torch_coverage.recording import recording
from conformance.torch_coverage.seen import seen_in_records
from tests.support.simulated_processes import exit_code

CLIP = "torch.nn.utils.clip_grad.clip_grad_norm_"


def _trained(norm: float) -> torch.Tensor:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm, foreach=False)


def test_lines_and_arguments_of_torch_are_recorded(tmp_path: Path) -> None:
    clip = nn.utils.clip_grad_norm_
    with recording(tmp_path, torch.device("cpu")):
        assert nn.utils.clip_grad_norm_ is clip
        _trained(float("inf"))
    _trained(1.0)
    seen = seen_in_records(tmp_path.parent, [tmp_path.name])
    assert seen.values[CLIP]["norm_type"] == {"inf"}
    assert seen.pairs[CLIP] == {("foreach", "norm_type")}
    assert seen.jumps["nn/utils/clip_grad.py"]
    assert all(not file.startswith("nn/modules") for file in seen.jumps)


class _Held:
    """Object whose end is noted."""

    ended = 0

    def __del__(self) -> None:
        _Held.ended += 1


def test_arguments_do_not_live_longer(tmp_path: Path) -> None:
    """The frame that is looked into keeps no argument in a second dictionary: `step` drops the closure."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    with recording(tmp_path, torch.device("cpu")):
        optimizer = torch.optim.SGD([parameter])
        held = _Held()
        optimizer.step(lambda held=held: torch.ones(1))
        del held
        assert _Held.ended == 1
    assert seen_in_records(tmp_path.parent, [tmp_path.name]).values["torch.optim.SGD.step"]["closure"] == {"function"}


def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    try:
        with recording(tmp_path, torch.device("cpu")):
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert not [*tmp_path.iterdir()]


def backward_on_a_device_is_recorded(directory: Path) -> None:
    """Reduce a gradient in a hook that the device's thread of autograd calls, twice in one process."""
    for _ in range(2):
        place = directory / uuid.uuid4().hex
        place.mkdir()
        with recording(place, torch.device("sim")):
            x = torch.ones(2, device="sim", requires_grad=True)
            threads: list[int] = []
            x.register_hook(  # type: ignore[no-untyped-call]
                partial(_clip_in_hook, threads)
            )
            torch.autograd.backward(x.sum())
        assert threads != [threading.get_ident()]
        assert seen_in_records(directory, [place.name]).values[CLIP]["norm_type"] == {"inf"}


def _clip_in_hook(threads: list[int], _gradient: torch.Tensor) -> None:
    threads.append(threading.get_ident())
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    nn.utils.clip_grad_norm_([parameter], 1.0, float("inf"))


def test_backward_on_a_device_is_recorded(tmp_path: Path) -> None:
    assert exit_code(backward_on_a_device_is_recorded, tmp_path) == 0
