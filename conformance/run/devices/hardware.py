"""Hardware for worlds of ranks: CUDA devices, for one rank each or several, simulated devices, or the processors."""

import json
import math
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec

from conformance.numerics.arithmetic import OWN, Arithmetic
from conformance.outcomes import Unsupported
from conformance.plan.substrates import Substrate
from conformance.run.devices.nvml import VISIBLE, Device, DeviceInterface, visible_devices
from conformance.run.ranks.messages import RANK_IN_VALUE
from conformance.sim import schedules
from conformance.sim.building import LIBRARY_VARIABLE, device_library
from reference_trainer.checks import UsageError

ACCELERATORS = ("auto", "cpu", "cuda", "sim")
"""Values of `--accelerator`; `sim` may be followed by a schedule, as in `sim:random:7`."""
SHARED_RANKS = 4
"""Maximum number of ranks on one device with `--share-gpu auto`.

Ranks on a device take turns, and collectives wait for all ranks: each additional rank slows down every collective.
Unverified beyond 4: https://github.com/NVIDIA/nccl/issues/418 has failures."""

MULTI_RANK_SINCE = (2, 30)
"""First version of NCCL that supports several ranks of a host on one device."""
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")

# Bitwise equal sums in every run: cuBLAS with a workspace that streams do not share, NCCL summing in the order of one
# ring.
# https://docs.nvidia.com/cuda/cublas/#results-reproducibility,
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
DETERMINISM = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    # One channel, since each would cut tensors into separate chunks; multicast, and the service for statistics, would
    # take memory and threads for nothing.
    "NCCL_MAX_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Variables of processes whose libraries compute in one thread; they are read when torch is imported.

Tensors of the suite are small: waking a second thread takes longer than a kernel (the square root of a vector in MKL),
and the threads of a process that judges would take the processors of its ranks."""
_ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Variable of sessions on devices, read when the rank server imports inductor: each rank would start up to 16 processes
that compile, and a rank that leaves a process behind is not used again."""
# Each rank takes few multiprocessors (`NCCL_MAX_CTAS`), or a collective of one rank could keep the kernels of the ranks
# that it waits for from starting; NVLink multicast does not support several ranks on a device.
_MULTI_RANK = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
# Older versions refuse two ranks of a host on one device. NCCL_HOSTID, with a different value in each rank, makes every
# rank a separate host; ranks of different hosts communicate over sockets.
_SOCKETS = {
    "NCCL_HOSTID": f"conformance-{RANK_IN_VALUE}",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}


class SimulatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated accelerator that a session uses in place of the machine's devices."""

    schedule: str
    """When queued operators run, see `schedules`."""
    library: str = ""
    """Path of the compiled device; empty if it cannot be compiled here."""
    lacks: str = ""
    """Reason why it cannot be compiled here."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """CUDA devices that a session may use, and the number of ranks that may share a device."""

    devices: tuple[Device, ...] = ()
    ranks_per_device: int = 1
    nccl: tuple[int, ...] = ()
    """Version of NCCL, such as (2, 29, 7)."""
    driver: str | None = None
    simulated: SimulatedDevice | None = None
    arithmetic: Arithmetic = OWN
    """Kernels of the processors, and the order in which reductions of gloo add."""

    def substrate(self, world_size: int, among: tuple[Substrate, ...]) -> Substrate | None:
        """Return the strongest of these substrates on which this machine can run a world, or None.

        `simulated` comes before all others: a law that holds in simulated worlds is about a model of memory or of
        collectives, and needs no devices. A session on the simulated accelerator uses it for each law that holds there.
        """
        if "simulated" in among:
            return "simulated"
        fits = world_size <= len(self.devices)
        shared = world_size <= len(self.devices) * self.ranks_per_device
        available: dict[Substrate, bool] = {
            "nccl": fits,
            "nccl-shared": shared and not fits,
            "sim": self.simulated is not None,
            "gloo": True,
        }
        return next((substrate for substrate, here in available.items() if here and substrate in among), None)

    def session_environment(self, *, worker: int = 0) -> dict[str, str]:
        """Return the environment variables of a session's worker, and of its rank server.

        Oracles compute on a device, too, on a different one for each worker if there are enough; libraries read these
        variables once.
        """
        if not self.devices:
            return ONE_THREAD | self._arithmetic_variables(self.arithmetic)
        own = self.devices[worker % len(self.devices)]
        return ONE_THREAD | DETERMINISM | _ONE_COMPILER | {VISIBLE: own.uuid}

    def environment(self, substrate: Substrate) -> dict[str, str]:
        """Return the environment variables for the ranks of a world."""
        if substrate == "nccl":
            return DETERMINISM
        if substrate == "nccl-shared":
            return DETERMINISM | (_MULTI_RANK if self.nccl >= MULTI_RANK_SINCE else _SOCKETS)
        if substrate == "simulated":
            return self._arithmetic_variables(OWN)  # about collectives and memory, not about numbers
        variables = self._arithmetic_variables(self.arithmetic)
        if substrate == "sim" and self.simulated is not None:
            variables |= {LIBRARY_VARIABLE: self.simulated.library, schedules.VARIABLE: self.simulated.schedule}
        return variables

    def _arithmetic_variables(self, arithmetic: Arithmetic) -> dict[str, str]:
        """Return the variables of the session's arithmetic, unless it is that of torch and gloo.

        Ranks inherit the variables of the session's processes.
        """
        return {} if self.arithmetic == OWN else arithmetic.variables


NO_DEVICES = Hardware()
"""Machine on which ranks compute on the CPU only."""


def devices_for(world_size: int, *, among: int) -> int:
    """Return how many devices out of `among` to lease for `world_size` ranks, spread as evenly as possible."""
    return math.ceil(world_size / math.ceil(world_size / among))


def device_type(substrate: str) -> Literal["cpu", "sim", "cuda"]:
    """Return the type of the device on which ranks of a substrate compute."""
    if substrate == "sim":
        return "sim"
    return kernel_type(substrate)


def kernel_type(substrate: str) -> Literal["cpu", "cuda"]:
    """Return the type of the device whose kernels compute, and round: the CPU's on the simulated accelerator too."""
    return "cuda" if substrate.startswith("nccl") else "cpu"


def find_hardware(
    interface: DeviceInterface, *, accelerator: str, share_gpu: str, arithmetic: Arithmetic = OWN
) -> Hardware:
    """Return the hardware of this machine that the options allow.

    With another arithmetic than that of torch and gloo only processors are used.

    The simulated accelerator is compiled, which takes minutes, if this machine has not compiled it yet. Raises
    UsageError for options that are unknown or contradict each other, for `cuda` where there is no device, or as
    `visible_devices` does.
    """
    kind, _, schedule = accelerator.partition(":")
    if kind not in ACCELERATORS or (schedule and kind != "sim"):
        raise UsageError(
            f"--accelerator {accelerator}: write {', '.join(ACCELERATORS[:-1])} or {ACCELERATORS[-1]}[:SCHEDULE]"
        )
    if kind == "cuda" and arithmetic != OWN:
        raise UsageError("--kernels and --sums replace what processors compute: leave out --accelerator cuda")
    if kind == "sim":
        if arithmetic.sums != "gloo":
            raise UsageError("--sums is for ranks that communicate by gloo: leave out --accelerator sim")
        return Hardware(simulated=_simulated_device(schedule or schedules.DEFAULT), arithmetic=arithmetic)
    if arithmetic != OWN:
        return Hardware(arithmetic=arithmetic)
    ranks_per_device = _ranks_per_device(share_gpu)
    devices = () if accelerator == "cpu" else visible_devices(interface)
    if accelerator == "cuda" and not devices:
        raise UsageError("--accelerator cuda: no CUDA device is visible; check the driver and CUDA_VISIBLE_DEVICES")
    if not devices:
        return Hardware(ranks_per_device=ranks_per_device)
    if exclusive := [device.uuid for device in devices if device.is_exclusive]:
        raise UsageError(
            f"{', '.join(exclusive)}: the compute mode allows one process, but ranks share a device with the process "
            "that judges them: set it to Default (nvidia-smi --compute-mode 0), or add --accelerator cpu"
        )
    return Hardware(devices=devices, ranks_per_device=ranks_per_device, nccl=nccl_version(), driver=interface.driver())


def _simulated_device(schedule: str) -> SimulatedDevice:
    schedules.Schedule.parse(schedule)
    try:
        return SimulatedDevice(schedule=schedule, library=str(device_library()))
    except Unsupported as missing:
        return SimulatedDevice(schedule=schedule, lacks=str(missing))


def _ranks_per_device(share_gpu: str) -> int:
    if share_gpu == "auto":
        return SHARED_RANKS
    if share_gpu == "never":
        return 1
    if not re.fullmatch("[1-9]", share_gpu):
        raise UsageError(f"--share-gpu {share_gpu}: write auto, never, or how many ranks may share a GPU, 1 to 9")
    return int(share_gpu)


def nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL, of the package on which torch's wheels depend, or else as torch reports it.

    A separate process asks torch, which takes seconds: the controller does not import torch.
    """
    for package in _NCCL_PACKAGES:
        try:
            return tuple(map(int, version(package).split(".")))
        except PackageNotFoundError:
            continue
    program = "import json, torch; print(json.dumps(torch.cuda.nccl.version()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return tuple(json.loads(done.stdout)[:3])
