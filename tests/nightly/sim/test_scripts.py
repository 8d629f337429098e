"""Training script for any accelerator: the same output on the CPU and on the simulated device, under each schedule."""

from functools import cache
from pathlib import Path

import pytest

from tests.support.programs import run_python
from tests.support.simulated_processes import library

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

variant, checkpoints = sys.argv[1:]
accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
backend = dist.get_default_backend_for_device(device)
if accelerator.type == "cpu":
    dist.init_process_group(backend)
else:
    dist.init_process_group(f"cpu:gloo,{accelerator.type}:{backend}", device_id=device)
mesh = init_device_mesh(accelerator.type, (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))

options = {"mesh": mesh["shard"]}
if variant == "mixed precision":
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
if variant == "offload":
    options["offload_policy"] = CPUOffloadPolicy(pin_memory=accelerator.type != "cpu")


def training():
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(50, 16), *blocks, nn.Linear(16, 50))
    if variant != "offload":
        model.to(device)
    for block in model[1:-1]:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches():
    tokens = TensorDataset(torch.randint(50, (32, 9), generator=torch.Generator().manual_seed(2)))
    sampler = DistributedSampler(tokens, shuffle=False)
    return DataLoader(tokens, batch_size=4, sampler=sampler, pin_memory=accelerator.type != "cpu")


def train(model, optimizer, scaler):
    for (batch,) in batches():
        batch = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=variant == "autocast"):
            scores = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            print("loss", loss.item().hex(), "norm", norm.full_tensor().item().hex())
        else:
            norm.full_tensor()


# Not with offload, where GradScaler reads too early: https://github.com/pytorch/pytorch/pull/176429
scaler = torch.amp.GradScaler(accelerator.type, enabled=variant in ("scaler", "autocast"))
model, optimizer = training()
train(model, optimizer, scaler)
states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.save(states, checkpoint_id=checkpoints)
model, optimizer = training()
states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.load(states, checkpoint_id=checkpoints)
set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
train(model, optimizer, scaler)
dist.barrier()
dist.destroy_process_group()
"""

AUTOCAST = "autocast"
VARIANTS = ("plain", "mixed precision", "offload", "scaler", AUTOCAST)


def printed_by(command: list[str], script: Path, variant: str, checkpoints: Path) -> list[str]:
    """Return the lines that two ranks of the script print."""
    done = run_python("-m", *command, str(script), variant, str(checkpoints), variables={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def on_sim(script: Path, variant: str, schedule: str) -> list[str]:
    """Return the lines that the script prints on the device."""
    command = ["conformance", "sim", "run", "--schedule", schedule, "--world", "2"]
    return printed_by(command, script, variant, script.with_name(f"{variant} {schedule}"))


@cache
def expected(script: Path, variant: str) -> list[str]:
    """Return the lines that the script prints without an accelerator.

    Autocast chooses other operators for accelerators than for the CPU: its lines are those of an eager device.
    """
    if variant == AUTOCAST:
        return on_sim(script, variant, "eager")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return printed_by(torchrun, script, variant, script.with_name(f"{variant} on the CPU"))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the script."""
    file = tmp_path_factory.mktemp("scripts") / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.mark.skipif(library() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("schedule", ["lazy", "random:1"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_script_prints_what_it_prints_on_the_cpu(script: Path, variant: str, schedule: str) -> None:
    printed = on_sim(script, variant, schedule)
    assert len(printed) == 8
    assert printed == expected(script, variant)


BACKWARD = """
import torch
x = torch.ones(8, 8, device="sim", requires_grad=True)
(x @ x).sum().backward()
"""


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_a_script_that_ends_with_its_backward_has_no_error(schedule: str, tmp_path: Path) -> None:
    """Autograd's thread drops its last references after `backward`; Python must not end it while it does."""
    library()
    script = tmp_path / "backward.py"
    script.write_text(BACKWARD)
    for _ in range(8):
        done = run_python("-m", "conformance", "sim", "run", "--schedule", schedule, str(script))
        assert done.returncode == 0, done.stderr
