"""Process that judges cases until it dies: an operator that touches device memory on the host ends it."""

import os
from multiprocessing.connection import Connection

from conformance.sim_runs.operators.cases import Case


def serve(connection: Connection, schedule: str) -> None:
    """Receive cases, send their outcomes, until the other end is closed."""
    import torch

    from conformance.sim.enabling import enable
    from conformance.sim_runs.operators.cases import judged

    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # kernels that die print their stacks
        os.dup2(silence, stream)
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    enable(schedule)
    try:
        while True:
            connection.send(judged(Case(*connection.recv())))
    except EOFError:
        return
