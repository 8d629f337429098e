"""Shims that an author picks, each in a separate process, since a process keeps them until it ends."""

import pytest

from tests.support import forked

_ATTENTION = """
import os
import torch
import torch.distributed as dist
from conformance.subjects import use_shims
use_shims("attention-of-local-heads", "attention-of-local-heads")
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from conformance.subjects.protocol import SubjectMistake
from conformance.subjects.shims import used_shims

os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
plain = [torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3)]
sharded = [distribute_tensor(each.detach(), mesh, [Shard(1)]).requires_grad_() for each in plain]
expected = F.scaled_dot_product_attention(*plain, is_causal=True)
measured = F.scaled_dot_product_attention(*sharded, is_causal=True)
assert measured.placements == (Shard(1),)
(expected**2).sum().backward()
(measured**2).sum().backward()
assert torch.equal(measured.full_tensor(), expected)
assert all(torch.equal(d.grad.full_tensor(), p.grad) for d, p in zip(sharded, plain))
for placements in ([Shard(2)], [Replicate()]):
    heads = [distribute_tensor(each.detach(), mesh, placements) for each in plain]
    mixed = heads if placements == [Shard(2)] else [heads[0], *sharded[1:]]
    try:
        F.scaled_dot_product_attention(*mixed)
    except SubjectMistake:
        continue
    raise AssertionError(placements)
assert used_shims() == [
    "attention-of-local-heads: `F.scaled_dot_product_attention` of DTensors computes each rank's samples and heads by "
    "themselves."
]
"""
_CUDA = """
import pickle
import torch
from conformance.subjects import use_shims
use_shims("cuda-as-processor")
torch.cuda.set_device(0)
assert torch.ones(2, device=torch.cuda.current_device()).cuda().device.type == "cpu"
assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
processor = torch.device(f"cuda:{torch.cuda.current_device()}")
assert [processor.type, torch.device("cuda", 0).type, torch.device("meta").type] == ["cpu", "cpu", "meta"]
assert isinstance(pickle.loads(pickle.dumps(processor)), torch.device) and not isinstance("cpu", torch.device)
torch.cuda.synchronize()
assert torch.cuda.max_memory_allocated() == 0
"""
_TRITON = """
import pytest
from conformance.subjects import use_shims
use_shims("importable-triton")
import triton
import triton.language as tl
from conformance.subjects.protocol import SubjectMistake

@triton.autotune(configs=[triton.Config({"BLOCK": 8})], key=["n"])
@triton.jit
def kernel(x, n: tl.constexpr):
    return tl.load(x)

with pytest.raises(SubjectMistake, match="launched"):
    kernel[(1,)](0, 1)
"""
_UNKNOWN = """
import pytest
from conformance.subjects import use_shims
from conformance.subjects.protocol import SubjectMistake
with pytest.raises(SubjectMistake, match="did you mean `importable-triton`"):
    use_shims("importable-trito")
"""


@pytest.mark.parametrize("program", [_ATTENTION, _CUDA, _TRITON, _UNKNOWN], ids=["attention", "cuda", "triton", "name"])
def test_a_shim_does_what_its_docstring_says(program: str) -> None:
    done = forked.run_text(program)
    assert done.returncode == 0, done.stderr
