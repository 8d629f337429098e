"""Sweeps on a device that is not the CPU: shards are there, and expected results need not be.

Their laws are for gloo alone: trials give up after half a second, and a device's watchdog would end the process.
"""

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from conformance.experiments import context as experiments_context
from conformance.plan.cells import Cell
from conformance.run.devices.hardware import find_hardware
from conformance.run.experiment import Experiment, job_of, json_like
from conformance.run.pool import Pools, Task
from conformance.run.ranks.messages import RankContext
from conformance.sweeps import operator_sweep, optimizers, options, parallel_styles, trials
from conformance.sweeps.trials import Swept
from tests.support.fake_devices import FakeDevices
from tests.support.simulated_processes import library

DEADLINE_S = 200.0
OPERATORS = (
    "add",
    "sum",
    "softmax of dim -1",
    "mm",
    "cat",
    "index_add_",
    "index_fill_",
    "slice zeroed",
    "cross_entropy, mean",
    "cross_entropy, weighted, mean",
    "layer_norm",
)
OPTIMIZERS = ("AdamW", "AdamW, foreach", "AdamW, fused", "SGD, momentum", "Adafactor", "Muon", "AdamW, tensor lr")
MODULES = (
    "ColwiseParallel of Linear",
    "RowwiseParallel of Embedding",
    "SequenceParallel of RMSNorm",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "loss_parallel, mean",
    "loss_parallel, mean, weighted",
)
OPTIONS = (
    "groups=root alone",
    "param_dtype=bf16, reduce_dtype=fp32",
    "offload_policy=True",
    "ignored_params=True",
    "checkpoint=True, forwards_per_step=2",
)


SWEEPS = (
    (operator_sweep.sweep, "dp2", OPERATORS),
    (optimizers.sweep, "dp2", OPTIMIZERS),
    (parallel_styles.sweep, "tp2", MODULES),
    (parallel_styles.compiled_sweep, "tp2", MODULES[:1]),
    (options.sweep, "dp2", OPTIONS),
)
EXPERIMENTS = {experiment.name: experiment for experiment, *_ in SWEEPS}


def sweep(context: RankContext, payload: dict[str, Any]) -> Any:
    """Sweep some subjects, with time limits that no call of a busy machine reaches."""
    names = ("_WAIT_LIMIT_S", "_WAIT_LIMIT_AFTER_ERROR_S", "_WAIT_LIMIT_AFTER_WAITING_S")
    longer: dict[str, Any] = dict.fromkeys(names, DEADLINE_S)
    limits = patch.multiple(trials, **longer)
    subjects = patch.object(experiments_context, "subjects_of", lambda _: frozenset(payload["subjects"]))
    with limits, subjects:
        return EXPERIMENTS[payload["experiment"]](context, payload["job"])


@pytest.mark.parametrize(
    ("experiment", "mesh", "subjects"),
    SWEEPS,
    ids=lambda value: value.name if isinstance(value, Experiment) else "",
)
def test_a_sweep_computes_what_it_computes_on_the_cpu(
    pools: Pools, experiment: Experiment[Swept], mesh: str, subjects: tuple[str, ...]
) -> None:
    """DTensor refuses the same, and has the same wrong: nothing is refused since tensors are on two devices."""
    if library() is None:
        return
    on_sim, on_cpu = (swept(pools, experiment, mesh, subjects, accelerator) for accelerator in ("sim", "cpu"))
    assert on_sim.computed == on_cpu.computed
    assert on_sim.refused == on_cpu.refused, on_sim.errors
    assert on_sim.wrong == on_cpu.wrong
    assert on_sim.outcomes.get("right", 0) > sum(on_sim.refused.values())


def swept(pools: Pools, experiment: Experiment[Swept], mesh: str, subjects: tuple[str, ...], accelerator: str) -> Swept:
    """Return the outcome of a sweep on rank 0."""
    hardware = find_hardware(FakeDevices(), accelerator=accelerator, share_gpu="auto")
    cell = Cell(mesh=mesh)
    with tempfile.TemporaryDirectory() as directory:
        job: Any = json_like(job_of(cell, Path(directory), defect=None))
        payload = {"experiment": experiment.name, "job": job, "subjects": list(subjects)}
        task = Task(f"{__name__}:sweep", payload, compiles=True)
        environment = hardware.environment("sim" if accelerator == "sim" else "gloo")
        results = pools.run(task, world_size=cell.world_size, deadline_s=DEADLINE_S, env=environment)
    first: Swept = msgspec.convert(results[0], Swept)
    return first
