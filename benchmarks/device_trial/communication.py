"""Bare communication of ranks that share a device, without the suite's pools: does NCCL work, and how does it add?

    python -m benchmarks.device_trial.communication cuda|cpu RECIPE_FILE

Two ranks, then four. The environment is the suite's; if NCCL fails, others are tried one after another, and the first
that works is left in RECIPE_FILE for the stages that follow (JSON, variables by name). On the CPU ranks use gloo.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.device_trial.stages import tell
from conformance.numerics.rings import GLOO_RING, NCCL_RING, Ring, ring_sum
from conformance.run.devices.hardware import find_hardware
from conformance.run.devices.nvml import machine_devices
from conformance.sim_runs.fidelity.probes.pair import started

RECIPES: tuple[dict[str, str], ...] = (
    {},
    {"NCCL_CUMEM_ENABLE": "0"},
    {"NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"},
    {"NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_NET_PLUGIN": "none", "NCCL_IB_DISABLE": "1"},
)
"""Variables to add to the suite's, until NCCL works."""
_LIMIT_S, _FIRST_LIMIT_S = 15.0, 30.0
"""Time that a world has, and the first world of all: its ranks are the first to read libraries from a cold disk."""
_SIZES_BYTES = (4, 1 << 16, 1 << 22)
_NUMELS = (64, 101)


def main(device: str, recipe_file: Path) -> int:
    """Print the values of ranks of two worlds; exit status 1 if no recipe works: then ranks cannot share the device."""
    for recipe in RECIPES if device == "cuda" else RECIPES[:1]:
        failure = _try_world(2, device, recipe)
        if failure is None:
            break
        tell(f"2 ranks with {_spelled(recipe)}", f"FAILED: {failure}")
    else:
        return 1
    tell("recipe", _spelled(recipe))
    recipe_file.write_text(json.dumps(recipe))
    failure = _try_world(4, device, recipe)
    if failure is not None:
        tell("4 ranks", f"FAILED: {failure}")
    return 0


def _spelled(recipe: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in recipe.items()) or "the suite's own variables"


def _try_world(size: int, device: str, recipe: Mapping[str, str]) -> str | None:
    """Run a world and print its values; returns why it failed, or None."""
    hardware = find_hardware(machine_devices(), accelerator=device, share_gpu=str(size))
    substrate = hardware.substrate(size, ("gloo", "nccl-shared", "nccl"))
    assert substrate is not None, "a world of this size fits"
    variables = {**os.environ, **hardware.environment(substrate), "NCCL_DEBUG": "WARN", **recipe}
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", __spec__.name, "rank", device, f"{directory}/meeting", str(size)]
        ranks = started(command, variables, size=size)
        limit_s = _LIMIT_S if recipe or size > 2 else _FIRST_LIMIT_S
        outputs = _outputs(ranks, limit_s)
    if any(rank.returncode for rank in ranks):
        killed = [str(number) for number, rank in enumerate(ranks) if rank.returncode == -signal.SIGKILL]
        late = f"not ended within {limit_s:g} s: ranks {', '.join(killed)}; " if killed else ""
        return late + _cause(outputs)
    results: list[dict[str, Any]] = [json.loads(output.splitlines()[-1]) for output in outputs]
    _tell_world(results)
    return None


def _outputs(ranks: Sequence["subprocess.Popen[str]"], limit_s: float) -> list[str]:
    until_s = time.monotonic() + limit_s
    outputs = []
    for rank in ranks:
        try:
            outputs.append(rank.communicate(timeout=max(0.1, until_s - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            rank.kill()
            outputs.append(rank.communicate()[0])
    return outputs


def _cause(outputs: Sequence[str]) -> str:
    lines = [line for output in outputs for line in output.splitlines()]
    telling = [line for line in lines if "WARN" in line] or [line for line in lines if "Error" in line] or lines[-1:]
    return telling[0].strip()[:200] if telling else "no output"


def _tell_world(results: Sequence[Mapping[str, Any]]) -> None:
    first, size = results[0], len(results)
    times = ", ".join(f"{spent_s * 1e3:.2f} ms for {nbytes} B" for nbytes, spent_s in first["all_reduce_s"])
    tell(f"{size} ranks", f"first collective after {first['first_s']:.1f} s, all-reduce {times}")
    orders = {name: _order(name, results) for name in ("all_reduce 64", "all_reduce 101", "reduce_scatter 64")}
    tell(f"{size} ranks, bf16 sums", ", ".join(f"{name}: {order}" for name, order in orders.items()))
    tell(f"{size} ranks, mean of 3", f"{first['mean']} (3 is exact)")
    if first["communicator_bytes"] is not None:
        mib = max(result["communicator_bytes"] for result in results) / 2**20
        tell(f"{size} ranks, memory of a communicator", f"{mib:.0f} MiB on the device")


def _order(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the order in which the ranks' terms were added, if the emulation knows it."""
    kind, _, numel = name.partition(" ")
    terms = [_terms(int(numel), rank, len(results)) for rank in range(len(results))]
    measured = torch.tensor([result["sums"][name] for result in results], dtype=torch.bfloat16)
    rings: dict[str, Ring] = {"NCCL's ring": NCCL_RING, "gloo's ring": GLOO_RING}
    matching = []
    for library, ring in rings.items():
        total = ring_sum(terms, dim=None if kind == "all_reduce" else 0, ring=ring)
        expected = total.expand(len(results), -1) if kind == "all_reduce" else total.view(len(results), -1)
        if torch.equal(measured, expected):
            matching.append(library)
    return " or ".join(matching) or "another order"


def _terms(numel: int, rank: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel * size, generator=generator).to(torch.bfloat16)


def rank_main(device: str, meeting: str, size: int, rank: int) -> None:
    """Communicate as one rank; prints the results as JSON."""
    on = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    before = _used_bytes(on)
    start_s = time.monotonic()
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    dist.all_reduce(torch.ones(1, device=on))
    _wait(on)
    first_s, used_bytes = time.monotonic() - start_s, _used_bytes(on)
    mean = torch.full((1,), 3.0, device=on)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    result = {
        "first_s": first_s,
        "communicator_bytes": None if used_bytes is None or before is None else used_bytes - before,
        "all_reduce_s": [(nbytes, _all_reduce_s(nbytes, on)) for nbytes in _SIZES_BYTES],
        "sums": dict(_sums(rank, size, on)),
        "mean": mean.item(),
    }
    dist.destroy_process_group()
    print(json.dumps(result), flush=True)


def _sums(rank: int, size: int, device: torch.device) -> list[tuple[str, list[float]]]:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    sums = []
    for numel in _NUMELS:
        total = _terms(numel, rank, size).to(device)
        dist.all_reduce(total)
        sums.append((f"all_reduce {numel}", total.tolist()))
    shard = torch.empty(_NUMELS[0], dtype=torch.bfloat16, device=device)
    scatter(shard, _terms(_NUMELS[0], rank, size).to(device))
    return [*sums, (f"reduce_scatter {_NUMELS[0]}", shard.tolist())]


def _all_reduce_s(nbytes: int, device: torch.device, *, times: int = 5) -> float:
    tensor = torch.ones(nbytes // 4, device=device)
    dist.all_reduce(tensor)
    _wait(device)
    start_s = time.monotonic()
    for _ in range(times):
        dist.all_reduce(tensor)
    _wait(device)
    return (time.monotonic() - start_s) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _used_bytes(device: torch.device) -> int | None:
    """Return the memory of the device that all processes have, including a context of this one; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.ones(1, device=device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank_main(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(main(sys.argv[1], Path(sys.argv[2])))
