"""DTensors that are redistributed with `async_op=True` corrupt memory on gloo, and the process dies.

Several all-gathers are in flight in each of two processes. After seconds a process dies of SIGSEGV or SIGABRT
("malloc(): unaligned tcache chunk detected"), in a worker thread of gloo at the end of
`AsyncAllgatherCoalescedWork::allgather_coalesced`, where the buffers of `gloo::AllgatherOptions` are destroyed, while
another worker is inside `gloo::allgather`. `all_gather_into_tensor` of `torch.distributed` takes another path and does
not die, nor does the functional operator with one call in flight. Why memory is corrupted is not known.

severity: medium
visible: loud
training: a process of a CPU run dies now and then
thread: none known
law: none
avoid: wait for each redistribution before the next is started
ranks: 2
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

LIMIT_S = 20.0
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
tensors = [distribute_tensor(torch.ones(45, 30), mesh, [Shard(0)]) for _ in range(40)]
print(f"expected to be alive after {LIMIT_S:g} s; a process that dies says nothing", flush=True)
start_s, goes_on = time.monotonic(), torch.ones(1)
while goes_on:
    gathered = [tensor.redistribute(placements=[Replicate()], async_op=True) for tensor in tensors]
    for tensor in gathered:
        tensor.full_tensor().clone()
    goes_on.fill_(time.monotonic() - start_s < LIMIT_S)
    dist.broadcast(goes_on, 0)  # rank 0 decides
dist.destroy_process_group()
sys.exit(0)
