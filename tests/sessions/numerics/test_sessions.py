"""Sessions in other arithmetics: their verdicts, and an assumption on layouts that torch's kernels hide."""

from pathlib import Path

import pytest

from conformance.numerics.arithmetic import KERNELS_VARIABLE, OWN, SUMS_VARIABLE, Arithmetic
from conformance.run.devices.hardware import Hardware, find_hardware
from tests.support.fake_devices import FakeDevices, some_devices
from tests.support.sessions import finish, suite

CELL = ("--cells", "id = tp2-fp32-default-meta", "--laws", "PAR-1,ENV-5")
CUTTING = """
import torch
from conformance.oracles import virtual_tp
virtual_tp._gathered = lambda shards, dim, is_view=False: torch.cat(shards, dim)
"""
OTHER = Arithmetic(kernels="other:1", sums="ring")


def test_a_session_computes_with_the_kernels_and_sums_that_are_asked_for(tmp_path: Path) -> None:
    directory = tmp_path / "report"
    session = finish(suite(directory, "conformance/", *CELL, "--kernels", "other:1", "--sums", "ring"), directory)
    assert session.status == 0, session.output
    report = session.report
    assert report.environment["hardware"]["arithmetic"] == {"kernels": "other:1", "sums": "ring"}
    assert "kernels other:1, sums ring" in session.output
    assert "--kernels=other:1 --sums=ring" in report.cases[0].repro


def test_gradients_of_another_layout_are_seen_by_other_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier emulation handed cuts of the logits' gradient to products; torch's kernels round both equally."""
    (tmp_path / "cutting.py").write_text(CUTTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    directory = tmp_path / "report"
    session = finish(suite(directory, "conformance/", *CELL, "-p", "cutting", "--kernels", "other:1"), directory)
    assert {case.law for case in session.report.cases if case.verdict == "fail"} == {"ENV-5", "PAR-1"}


@pytest.mark.parametrize(
    ("kernels", "sums", "accelerator", "message"),
    [
        ("mkl", "gloo", "auto", "--kernels mkl: write torch, or other:SEED"),
        ("other:x", "gloo", "auto", "--kernels other:x: write torch, or other:SEED"),
        ("torch", "nccl", "auto", "--sums nccl: write gloo, ring or tree"),
        ("other:1", "gloo", "cuda", "--kernels and --sums replace what processors compute"),
        ("torch", "tree", "sim", "--sums is for ranks that communicate by gloo: leave out --accelerator sim"),
    ],
)
def test_what_cannot_be_computed_is_refused(kernels: str, sums: str, accelerator: str, message: str) -> None:
    def find() -> Hardware:
        arithmetic = Arithmetic.parse(kernels=kernels, sums=sums)
        return find_hardware(
            FakeDevices(some_devices(1)), accelerator=accelerator, share_gpu="auto", arithmetic=arithmetic
        )

    with pytest.raises(ValueError, match=message):
        find()


def test_devices_are_left_alone() -> None:
    found = find_hardware(FakeDevices(some_devices(2)), accelerator="auto", share_gpu="auto", arithmetic=OTHER)
    assert found == Hardware(arithmetic=OTHER)


def test_processes_are_told_and_simulated_worlds_keep_torchs_kernels() -> None:
    hardware = Hardware(arithmetic=OTHER)
    told = {KERNELS_VARIABLE: "other:1", SUMS_VARIABLE: "ring"}
    assert hardware.environment("gloo") == told
    assert hardware.session_environment().items() >= told.items()
    assert hardware.environment("simulated") == {KERNELS_VARIABLE: OWN.kernels, SUMS_VARIABLE: OWN.sums}
    assert Hardware().environment("gloo") == Hardware().environment("simulated") == {}
