"""`python -m conformance predict --simulate`: FSDP2 in a run without memory needs the predicted memory."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.__main__ import main
from conformance.defects.catalogue import injected
from conformance.experiments.memory import step_in_simulation
from conformance.oracles.memory_model import usage_by_phase
from conformance.plan.cells import Cell
from conformance.run.experiment import job_of
from conformance.run.ranks.messages import RankContext
from conformance.sizing.prediction import Request, prediction
from conformance.sizing.simulation import Simulation, fake_step, simulation
from reference_trainer.parallel_dims import resolve_mesh
from tests.support.programs import run_python

SMALL = ["n_layers=3", "dim=1024", "n_heads=8", "n_kv_heads=4", "ffn_dim=2048", "vocab_size=32768", "max_seq_len=256"]


def of(mesh: str = "dp64", **options: Any) -> Simulation:
    defaults = {"model": "llama3-8b", "overrides": SMALL, "seq_len": 128}
    return simulation(msgspec.convert(defaults | options | {"mesh": mesh}, Request))


def largest_deviation(simulated: Simulation) -> float:
    metrics = [simulated.state, *(metric for kinds in simulated.phases.values() for metric in kinds.values())]
    return max(abs(metric.ratio - 1) for metric in metrics)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp64", {}),
        ("dp64", {"reshard": "always"}),
        ("dp64", {"reshard": "never", "precision": "bf16-reduce"}),
        ("dp64", {"reshard": "8", "activation_checkpointing": "full"}),
        ("hsdp4x16", {"accumulation": 2}),
    ],
)
def test_simulated_is_predicted(mesh: str, options: dict[str, Any]) -> None:
    simulated = of(mesh, **options)
    assert list(simulated.phases) == ["forward", "backward", "clip", "optimizer", "idle"]
    assert largest_deviation(simulated) < 0.0001


def test_a_slice_of_a_large_model_on_1024_ranks() -> None:
    """Four layers of a model of 70 billion parameters, in full width, show deviations of one layer or parameter."""
    simulated = of("dp1024", model="llama3-70b", overrides=["n_layers=4"], seq_len=8192)
    assert simulated.phases["backward"]["peak"].simulated_bytes > 30 * 1024**3
    assert largest_deviation(simulated) < 0.0001
    assert simulated.cpu_s < 30


def test_with_tensor_parallelism_as_json() -> None:
    """The command runs in a separate process, see `fake_step`."""
    shape = [f"--set={override}" for override in SMALL]
    options = ["--model=llama3-8b", "--mesh=hsdp2x8-tp4", "--seq-len=128", *shape, "--simulate", "--json"]
    predicted = json.loads(run_python("-m", "conformance", "predict", *options).stdout)
    assert predicted["ranks"] == 64
    assert largest_deviation(msgspec.convert(predicted["simulation"], Simulation)) < 0.0001


@pytest.mark.parametrize(("checkpointing", "norms"), [("none", 2 * 8 + 1), ("selective", 1), ("full", 1)])
@pytest.mark.parametrize(("precision", "bytes_of_norms"), [("fp32", 4), ("bf16-mp", 6)])
def test_the_estimate_is_what_the_operators_keep_but_for_norms(
    precision: str, bytes_of_norms: int, checkpointing: str, norms: int
) -> None:
    """Norms that are not fused keep the normalised input too, and both in fp32: so many bytes more of an element."""
    request = Request(
        model="llama3-8b",
        mesh="dp64",
        overrides=[*SMALL[1:], "n_layers=8"],
        seq_len=256,
        precision=precision,
        activation_checkpointing=checkpointing,
    )
    not_fused = bytes_of_norms * 256 * 1024 * norms
    estimated, simulated = prediction(request).activation_bytes, simulation(request).activation_bytes
    assert simulated == pytest.approx(estimated + not_fused, rel=0.0002)


@pytest.mark.parametrize(
    ("defect", "phase", "kind"),
    [("one-layer-not-resharded", "forward", "end"), ("reduce-buffers-kept", "backward", "peak")],
)
def test_a_fault_is_seen(defect: str, phase: str, kind: str) -> None:
    with injected(defect):
        simulated = of(reshard="always", precision="fp32")
    assert simulated.phases[phase][kind].ratio > 1.02


def test_the_ledger_of_fake_tensors_agrees_with_that_of_real_ones(tmp_path: Path) -> None:
    """The ledgers agree to the byte in forward, backward and clipping; some scalars of optimizers differ."""
    cell = Cell(mesh="dp4")
    config = cell.config
    context = RankContext(rank=0, world_size=1, rendezvous="", timeout_s=60.0)
    real = usage_by_phase(step_in_simulation.perform(context, job_of(cell, tmp_path, defect=None)).segments)
    fake = usage_by_phase(fake_step(config, resolve_mesh(config.mesh, world_size=cell.world_size)).segments)
    for phase in ("forward", "backward", "clip"):
        assert fake[phase] == real[phase], phase
    assert abs(fake["optimizer"].peak_bytes - real["optimizer"].peak_bytes) <= 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--offload=cpu"], "offload cpu cannot be simulated: the simulated device is the CPU"),
        (["--mesh=pp2-dp4", "--accumulation=2"], "mesh pp2-dp4 cannot be simulated"),
        (["--logits=freed"], "logits freed cannot be simulated: the trainer keeps them"),
        (["--mesh=dp3-tp3"], "model.n_heads 8 is not divisible by mesh.tp 3"),
        (["--set=n_layers=0"], "model.n_layers is 0, must be at least 1"),
        (["--set=depth=3"], "--set depth=3"),
    ],
)
def test_what_cannot_be_simulated(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = [f"--set={override}" for override in SMALL]
    assert main(["predict", "--model=llama3-8b", "--mesh=dp64", "--seq-len=128", *shape, "--simulate", *options]) == 4
    assert message in capsys.readouterr().err


def test_a_torch_that_cannot_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)
    with pytest.raises(ValueError, match=r"--simulate: torch \S+ has no FakeTensorMode"):
        of()
