"""Process that judges cases until it dies: an operator that touches device memory on the host ends it."""

import os
from multiprocessing.connection import Connection

from conformance.sim_runs.operators.cases import Case


def serve(connection: Connection, schedule: str) -> None:
    """Receive pairs of a case and whether the CPU alone is wanted; send outcomes, until the other end is closed."""
    import torch

    from conformance.sim import device
    from conformance.sim.building import device_library
    from conformance.sim.schedules import Schedule
    from conformance.sim_runs.operators.cases import judged, run_on_cpu

    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # kernels that die print their stacks
        os.dup2(silence, stream)
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    extension = device.load(device_library(), with_generators=True)  # torch's samples fork the device's generator
    extension.use_generators_of_device(False)  # but operators use the CPU's: their numbers can be compared
    device.follow(Schedule.parse(schedule))
    device.poison(True)
    try:
        while True:
            case, on_cpu = connection.recv()
            if on_cpu:
                run_on_cpu(Case(*case))
                connection.send(None)
            else:
                connection.send(judged(Case(*case)))
    except EOFError:
        return
