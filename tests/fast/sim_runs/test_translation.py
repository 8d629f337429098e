"""Translation of a program for CUDA: names of the device in strings and in code, and all that stays."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from conformance.sim.device import BACKEND, BACKENDS
from conformance.sim_runs.translation import translate_imports, translated


def names(source: str, directory: Path) -> dict[str, object]:
    """Return the variables of a translated program in which each call returns its own text."""
    file = directory / "program.py"
    file.write_text(source)
    variables: dict[str, object] = {}
    exec(translated(file).code, variables)
    return variables


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda", "sim"),
        ("cuda:1", "sim:1"),
        ("rank:0/cuda:0", "rank:0/sim:0"),
        ("nccl", "simccl"),
        ("cpu:gloo,cuda:nccl", "cpu:simccl,sim:simccl"),
        ("torch.cuda.Stream", "torch.sim.Stream"),
        ("--no-cuda", "--no-cuda"),
        ("use_cuda", "use_cuda"),
        ("gloo", "gloo"),
        ("CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_strings_name_the_device(text: str, expected: str, tmp_path: Path) -> None:
    assert names(f"text = {text!r}", tmp_path)["text"] == expected


CODE = """
class Names:
    def __init__(self, path=()):
        self.path = path
    def __getattr__(self, name):
        return Names((*self.path, name))
    def __call__(self, *arguments):
        return self.path
torch = Names()
rank, cuda, TEST_CUDA, TEST_PRIVATEUSE1 = 1, "variable", False, True
stream = torch.cuda.Stream()
moved = torch.ones.cuda(rank)
kept = torch.backends.cuda.matmul(), torch.version.cuda(), torch.cuda.nccl.version()
where = f"cuda:{rank}"
is_there = TEST_CUDA
variable = cuda
question = torch.is_cuda()
"""


def test_attributes_name_the_device_and_names_of_the_build_stay(tmp_path: Path) -> None:
    found = names(CODE, tmp_path)
    assert found["stream"] == ("sim", "Stream")
    assert found["moved"] == ("ones", "sim")
    assert found["kept"] == (("backends", "cuda", "matmul"), ("version", "cuda"), ("cuda", "nccl", "version"))
    assert found["where"] == "sim:1"
    assert found["question"] == ("is_sim",)
    assert found["is_there"] is True
    assert found["variable"] == "variable"


AMP = """
from torch import cuda
from torch.cuda.amp import GradScaler
import torch.amp
scalers = GradScaler(), torch.amp.GradScaler(init_scale=2.0), torch.cuda.amp.GradScaler(2.0)
given = torch.amp.GradScaler("cpu"), torch.amp.GradScaler(device="cpu")
"""


def test_loss_scaling_for_cuda_is_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "sim", object(), raising=False)
    found = names(AMP, tmp_path)
    assert [scaler._device for scaler in found["scalers"]] == ["sim"] * 3  # type: ignore[attr-defined]
    assert [scaler._device for scaler in found["given"]] == ["cpu"] * 2  # type: ignore[attr-defined]
    assert found["cuda"] is torch.sim  # type: ignore[attr-defined]


GROUPS = """
def init_process_group(backend, **kwargs): return backend
def new_group(ranks, backend): return backend
def choose(backend): return backend
asked = init_process_group("gloo"), new_group([0], backend="gloo"), init_process_group(backend="nccl")
other = choose("gloo")
"""


def test_gloo_has_tensors_of_both_devices(tmp_path: Path) -> None:
    found = names(GROUPS, tmp_path)
    assert found["asked"] == (BACKENDS, BACKENDS, BACKEND)
    assert found["other"] == "gloo"


def test_a_program_for_any_accelerator_runs_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text('"""Also on cuda."""\nimport torch\ndevice = torch.accelerator.current_accelerator()  # cuda\n')
    assert translated(file).replacements == 0


def test_lines_of_errors_are_those_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as error:
        names("device = 'cuda'\n\n1 / 0\n", tmp_path)
    assert error.traceback[-1].lineno == 2


def test_modules_of_folders_and_chosen_modules_are_translated_when_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder, name in ((inside, "sim_inner"), (outside, "sim_outer"), (outside, "sim_chosen")):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text("name = 'cuda'\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [str(inside), str(outside), *sys.path])
    translate_imports([inside], ["sim_chosen"])
    found = {name: importlib.import_module(name).name for name in ("sim_inner", "sim_outer", "sim_chosen")}
    assert found == {"sim_inner": "sim", "sim_outer": "cuda", "sim_chosen": "sim"}
    assert not list(inside.rglob("*.pyc")), "bytecode would be taken for that of the untranslated module"
