"""Adaptation of torch's test harness to the simulated device, and to processes that start fast."""

import multiprocessing
import os
import unittest
from multiprocessing import context
from pathlib import Path
from typing import Any

import torch

from conformance.sim import settings
from conformance.sim_runs.pytorch_tests.names import repeat_names
from conformance.sim_runs.pytorch_tests.running import TESTS_VARIABLE
from conformance.sim_runs.pytorch_tests.turns import Condition, has_turns, take_turns
from conformance.sim_runs.translation import translate_imports

HARNESS = (
    "torch.testing._internal.common_cuda",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._tensor.common_dtensor",
    "torch.testing._internal.distributed.fake_pg",
    "torch.testing._internal.distributed.multi_threaded_pg",
    "torch.testing._internal.distributed.checkpoint_utils",
    "torch.testing._internal.distributed.common_state_dict",
    "torch.testing._internal.distributed._shard.sharded_tensor",
    "torch.testing._internal.distributed._shard.sharded_tensor._test_st_common",
)
"""Modules of torch that ask for CUDA by name on behalf of the tests."""


def starts_ranks(file: Path) -> bool:
    """Return whether a test file lets torch's harness start processes: others start theirs, and look at them."""
    text = file.read_text()
    return any(module in text for module in HARNESS)


def serve_processes(preload: str) -> None:
    """Fork the processes that tests start from a server that has imported a module, instead of spawning them."""
    served = context._concrete_contexts["forkserver"]  # type: ignore[attr-defined]  # nothing public replaces a method
    context._concrete_contexts["spawn"] = served  # type: ignore[attr-defined]
    multiprocessing.set_forkserver_preload([preload])


def prepare() -> None:
    """Adapt torch's harness; with the device, translate all that this process imports from it and from the tests."""
    has_device = settings.SCHEDULE_VARIABLE in os.environ
    if settings.RECORD_VARIABLE in os.environ:
        repeat_names()
    if has_device:
        translate_imports([Path(os.environ[TESTS_VARIABLE])], HARNESS)
    from torch.testing._internal import common_distributed, common_fsdp

    skip_without_ranks(common_distributed.MultiProcessTestCase)
    if decorator := vars(common_fsdp).get("compiled_fsdp_test"):  # before torch 2.7 it had a name of a test
        vars(common_fsdp)["test_compiled_fsdp"] = decorator
        decorator.__test__ = False
    if has_device:
        _answer_for_cuda()


def share_device() -> None:
    """Let ranks that are threads of this process stay on its first device, as on a GPU that is in use already."""
    if settings.SCHEDULE_VARIABLE in os.environ:
        torch.get_device_module().init()  # an unused device is chosen by DeviceMesh, for each rank another one


def skip_without_ranks(case: Any) -> None:
    """Skip a test for which torch's harness starts no process, since its number of ranks is that of the devices."""
    check = case._check_return_codes

    def check_ranks(self: Any, *arguments: Any) -> None:
        if not self.processes:
            raise unittest.SkipTest("no ranks: there is no device")
        check(self, *arguments)

    case._check_return_codes = check_ranks


def _answer_for_cuda() -> None:
    """Give torch's harness the answers of CUDA and NCCL that no device of another kind has."""
    from torch.testing._internal import common_distributed, common_utils
    from torch.testing._internal.distributed import multi_threaded_pg

    vars(common_utils)["get_cycles_per_ms"] = lambda: 1.0
    vars(common_utils)["requires_cuda"] = lambda test: test
    vars(torch.get_device_module())["_sleep"] = lambda cycles: None  # the device has no clock
    vars(common_distributed)["requires_nccl_version"] = lambda *_: lambda test: test  # the newest
    no_multicast = unittest.skip("multicast support is not available")  # torch's own asks the driver of CUDA
    vars(common_distributed)["requires_multicast_support"] = lambda: no_multicast
    order_threads(multi_threaded_pg.Collective)
    take_turns(common_distributed.MultiThreadedTestCase, multi_threaded_pg)


def order_threads(collective: Any) -> None:
    """Let ranks that are threads wait for their streams where they exchange tensors.

    Torch's group of threads orders its hosts alone; on a GPU, its copies between the streams of two ranks are races.
    """
    create, join = collective.__init__, collective.join

    def create_ordered(self: Any, world_size: int, operation: Any, group: Any) -> None:
        create(self, world_size, _Finished(operation), group)
        if has_turns():
            self._start_cond = self._done_cond = Condition()

    def join_ordered(self: Any, rank: int, tensors: Any) -> Any:
        torch.accelerator.current_stream().synchronize()
        return join(self, rank, tensors)

    collective.__init__, collective.join = create_ordered, join_ordered


class _Finished:
    """Collective between threads that has finished when its function returns."""

    def __init__(self, operation: Any) -> None:
        self._operation = operation

    def work(self, tensors: Any) -> None:
        self._operation.work(tensors)
        torch.accelerator.current_stream().synchronize()
