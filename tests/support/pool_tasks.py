"""Functions that tests of the pool run in its ranks; misbehaviour is limited to the rank `payload["rank"]`."""

import ctypes
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist

from conformance.experiments.context import start_process_group
from conformance.instruments.timing import StepProfile
from conformance.numerics.knobs import pin_numerics, pinned_knobs
from conformance.run.ranks.messages import RankContext

LONG_S = 60.0


def profiled_step(context: RankContext, payload: dict[str, Any]) -> Any:
    """Compute and communicate in two steps, of which the second is profiled."""
    start_process_group(context)
    profiled, tensor = StepProfile(1), torch.ones(64, 64)
    for step in range(2):
        profiled.begin(step)
        dist.all_reduce(tensor @ tensor)
        profiled.end(step)
    dist.destroy_process_group()
    return msgspec.to_builtins(profiled.communication)


def identity(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    return {"rank": context.rank, "world_size": context.world_size, "pid": os.getpid(), "payload": payload}


def surroundings(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    server = os.getppid()
    return {
        "env": {name: os.environ.get(name) for name in payload["names"]},
        "server": server,
        "server_threads": len(os.listdir(f"/proc/{server}/task")),
        "torch_threads": torch.get_num_threads(),
        "has_pytest": "pytest" in sys.modules,
        "has_cuda_context": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        "timeout_s": context.timeout_s,
    }


def change_process_state(_context: RankContext, _payload: dict[str, Any]) -> list[Any]:
    """Return the state of the process that the task found, then change it."""
    state: list[Any] = [random.random(), torch.rand(()).item(), str(torch.get_default_dtype()), torch.is_grad_enabled()]
    state += [torch.are_deterministic_algorithms_enabled(), os.environ.get("LEFT_BEHIND"), os.getcwd()]
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    return state


def knobs(_context: RankContext, _payload: dict[str, Any]) -> dict[str, bool]:
    """Return the knobs of the process that the task found, then set them for a device."""
    found = pinned_knobs("cpu")
    pin_numerics("cuda")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    return found


def join(context: RankContext) -> None:
    dist.init_process_group("gloo", init_method=context.rendezvous, rank=context.rank, world_size=context.world_size)


def misbehave_in_collective(context: RankContext, payload: dict[str, Any]) -> None:
    """Enter a barrier on every rank but the one that misbehaves instead."""
    join(context)
    dist.barrier()
    if context.rank == payload["rank"]:
        MISBEHAVIOURS[payload["how"]]()
    dist.barrier()
    dist.destroy_process_group()


def misbehave(context: RankContext, payload: dict[str, Any]) -> str:
    if context.rank == payload["rank"]:
        MISBEHAVIOURS[payload["how"]]()
    return "done"


def raise_error() -> None:
    raise ValueError("bad weights")


def raise_huge_error() -> None:
    raise ValueError("\udc80" + "x" * 10_000_000)


def sleep() -> None:
    time.sleep(LONG_S)


def sleep_with_interpreter_lock() -> None:
    ctypes.PyDLL(None).sleep(int(LONG_S))


def segfault() -> None:
    ctypes.string_at(0)


def leave_children() -> None:
    """Start a child in this process group, and one that leaves the group and loses its parent."""
    subprocess.Popen(["sleep", str(LONG_S)])
    subprocess.Popen(["setsid", "--fork", "sleep", str(LONG_S)]).wait()


def die_with_children() -> None:
    leave_children()
    os._exit(3)


def leave_thread() -> None:
    threading.Thread(target=time.sleep, args=(LONG_S,), name="forgotten").start()


def leave_process_group() -> None:
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)


def print_much() -> None:
    line = "y" * 99
    for _ in range(200_000):
        print(line)
    os.write(2, b"the very end\n")


def write_garbage() -> None:
    """Write to every socket, and so to that of the pool."""
    for fd in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd") / fd
        if path.is_symlink() and os.readlink(path).startswith("socket:"):
            os.write(int(fd), b"garbage")
    time.sleep(LONG_S)


def close_everything() -> None:
    os.closerange(3, 1000)


def stop() -> None:
    psutil.Process().suspend()


MISBEHAVIOURS = {
    "raise": raise_error,
    "raise_huge": raise_huge_error,
    "sleep": sleep,
    "sleep_with_interpreter_lock": sleep_with_interpreter_lock,
    "segfault": segfault,
    "exit_0": lambda: os._exit(0),
    "sys_exit": lambda: sys.exit(0),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
    "leave_children": leave_children,
    "die_with_children": die_with_children,
    "leave_thread": leave_thread,
    "leave_process_group": leave_process_group,
    "print_much": print_much,
    "write_garbage": write_garbage,
    "close_everything": close_everything,
    "stop": stop,
}


def return_scalar(_context: RankContext, _payload: dict[str, Any]) -> Any:
    return {"losses": [1.0, torch.ones(()).numpy()[()]]}


def return_infinities(_context: RankContext, _payload: dict[str, Any]) -> list[float]:
    return [float("nan"), float("inf"), -0.0]


def leave_dump(context: RankContext, payload: dict[str, Any]) -> None:
    """Write a dump where the flight recorder would, next to the rank's other files."""
    directory = Path(os.readlink("/proc/self/fd/1")).parent
    (directory / f"flight{context.rank}").write_bytes(bytes.fromhex(payload["dump"]))


def fail_with_dump(context: RankContext, payload: dict[str, Any]) -> None:
    """Leave a dump and raise on rank 0, hang on the other ranks."""
    if context.rank != 0:
        sleep()
    leave_dump(context, payload)
    raise_error()


def reduce_and_hang(context: RankContext, payload: dict[str, Any]) -> int:
    """Reduce once, then hang if the payload says so; returns the process id."""
    dist.init_process_group("gloo", init_method=context.rendezvous, rank=context.rank, world_size=context.world_size)
    dist.all_reduce(torch.ones(4))
    if payload["hangs"]:
        sleep()
    dist.destroy_process_group()
    return os.getpid()


def group_twice(context: RankContext, _payload: dict[str, Any]) -> list[float]:
    """Make the default process group twice in one task; returns a sum over the ranks of each."""
    sums = []
    for number in (1.0, 2.0):
        join(context)
        tensor = torch.tensor(number)
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        dist.destroy_process_group()
    return sums


def open_files(_context: RankContext, _payload: dict[str, Any]) -> int:
    """Return the number of open files of this rank, when the groups of earlier tasks have ended."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join()
    return len(os.listdir("/proc/self/fd"))


def compile_a_square(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Compile and call a function; returns its result, and whether the compiler was there before."""
    preloaded = "torch._inductor.lowering" in sys.modules
    square = torch.compile(torch.square, backend="aot_eager")
    result = square(torch.tensor(3.0)).item()
    torch.compiler.reset()
    return {"preloaded": preloaded, "result": result}


_called: list[str] = []


def note_call(argument: str) -> None:
    """Call of a template: note the argument where ranks find it, write it into the file that it names, or raise."""
    if argument == "raise":
        raise_error()
    _called.append(argument)
    with Path(argument).open("a") as file:
        file.write(f"{os.getpid()} {os.environ.get('SOME_SWITCH')}\n")
    os.chdir("/")


def found_call(_context: RankContext, _payload: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of all calls of templates that this rank knows, and its place."""
    return {"called": list(_called), "parent": os.getppid(), "pid": os.getpid(), "home": os.getcwd()}
