"""Simulated device in a separate process: memory, allocator, streams, schedules and copies."""

import ctypes
import signal
from collections.abc import Callable

import pytest
import torch

from conformance.sim import device
from conformance.sim.schedules import Schedule
from tests.support.simulated_processes import exit_code, library

KIBI, MEBI = 1 << 10, 1 << 20


def on_sim(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="sim")


def bytes_of(kind: str, when: str = "current") -> int:
    return int(torch.accelerator.memory_stats()[f"{kind}_bytes.all.{when}"])


def follow(schedule: str) -> None:
    device.follow(Schedule.parse(schedule))


def host_dereferences() -> None:
    ctypes.c_char.from_address(on_sim(8).data_ptr()).value  # noqa: B018


def test_a_host_that_dereferences_device_memory_dies() -> None:
    assert exit_code(host_dereferences) == (-signal.SIGSEGV if library() else 0)


def sizes_are_rounded() -> None:
    for requested, allocated, reserved in (
        (1, 512, 2 * MEBI),
        (513, 1024, 2 * MEBI),
        (MEBI, MEBI, 2 * MEBI),
        (MEBI + 1, MEBI + 512, 20 * MEBI),
        (10 * MEBI, 10 * MEBI, 10 * MEBI),
        (11 * MEBI, 12 * MEBI, 12 * MEBI),  # a rest of 1 MiB is not cut off
    ):
        torch.accelerator.empty_cache()
        tensor = on_sim(requested)
        assert [bytes_of(kind) for kind in ("requested", "allocated", "active", "reserved")] == [
            tensor.nbytes,
            allocated,
            allocated,
            reserved,
        ]
        del tensor
    torch.accelerator.empty_cache()
    assert bytes_of("reserved") == 0


def blocks_are_split_and_merged() -> None:
    first, second, third = (on_sim(256 * KIBI) for _ in range(3))
    addresses = [tensor.data_ptr() for tensor in (first, second, third)]
    assert addresses == [addresses[0] + index * 256 * KIBI for index in range(3)], "blocks are cut from one segment"
    del first, second
    assert on_sim(512 * KIBI).data_ptr() == addresses[0], "two free neighbours are one block"
    del third
    assert on_sim(MEBI).data_ptr() == addresses[0]
    assert bytes_of("reserved") == 2 * MEBI


def the_best_block_is_taken() -> None:
    blocks = [on_sim(size * KIBI) for size in (64, 1, 16, 1, 32, 1)]
    wanted = blocks[2].data_ptr()
    blocks[0] = blocks[2] = blocks[4] = blocks[1]
    assert on_sim(16 * KIBI).data_ptr() == wanted


def large_blocks_keep_what_is_small() -> None:
    """The rest of a large block is cut off only if it is more than 1 MiB."""
    tensor = on_sim(20 * MEBI)
    del tensor
    tensor = on_sim(19 * MEBI)
    assert bytes_of("allocated") == 20 * MEBI
    del tensor
    tensor = on_sim(18 * MEBI)
    assert bytes_of("allocated") == tensor.nbytes


def streams_have_pools_of_their_own() -> None:
    address = on_sim(MEBI).data_ptr()
    stream = torch.Stream(device="sim")
    with stream:
        assert on_sim(MEBI).data_ptr() != address
    assert on_sim(MEBI).data_ptr() == address


def record_stream_holds_memory() -> None:
    follow("lazy")
    stream = torch.Stream(device="sim")
    tensor = on_sim(MEBI)
    with stream:
        tensor.add_(1)
    tensor.record_stream(stream)
    del tensor
    assert (bytes_of("allocated"), bytes_of("active")) == (0, MEBI)
    on_sim(1)
    assert bytes_of("active") == MEBI, "the stream has not caught up"
    stream.synchronize()
    on_sim(1)
    assert bytes_of("active") == 0


def memory_ends() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="the simulated device has no"):
        on_sim(1 << 37)


def fresh_memory_is_poison() -> None:
    device.poison(True)
    assert torch.empty(3, device="sim").cpu().isnan().all()


def streams_run_in_their_order() -> None:
    follow("lazy")
    x = torch.zeros(4, device="sim")
    stream = torch.Stream(device="sim")
    host = torch.full((4,), 9.0, pin_memory=True)
    x.add_(1)
    with stream:
        host.copy_(x, non_blocking=True)
    stream.synchronize()
    assert host.tolist() != [1.0] * 4, "nothing orders the copy behind the addition"
    event = torch.Event(device="sim")
    event.record()
    with stream:
        stream.wait_event(event)
        host.copy_(x, non_blocking=True)
    stream.synchronize()
    assert host.tolist() == [1.0] * 4


def schedules_differ() -> None:
    executed = []
    for schedule in ("eager", "lazy", "random:3", "starve:1"):
        follow(schedule)
        starved = torch.Stream(device="sim")
        before = device.counts()["executed"]
        x = torch.ones(2, device="sim")
        with starved:
            torch.ones(2, device="sim")
        executed.append(device.counts()["executed"] - before)
        assert (x + x).tolist() == [2, 2]
    assert executed[:2] == [2, 0]
    assert executed[3] == 1, "the starved stream alone waits"


def copies_wait_as_cuda_says() -> None:
    follow("lazy")
    x = torch.ones(4, device="sim")
    pinned, pageable = torch.zeros(4, pin_memory=True), torch.zeros(4)
    assert (pinned.is_pinned(), pageable.is_pinned()) == (True, False)
    pinned.copy_(x, non_blocking=True)
    assert pinned.tolist() == [0] * 4, "the host goes on"
    pinned.copy_(x)
    assert pinned.tolist() == [1] * 4
    pageable.copy_(x, non_blocking=True)
    assert pageable.tolist() == [1] * 4, "the host waits"
    pageable.fill_(3)
    x.copy_(pageable, non_blocking=True)
    pageable.fill_(4)
    assert x.tolist() == [3] * 4, "pageable memory is read at once"
    pinned.fill_(5)
    x.copy_(pinned, non_blocking=True)
    pinned.fill_(6)
    assert x.tolist() == [6] * 4, "pinned memory is read when the stream gets there"


def copies_to_another_device_are_in_the_trace() -> None:
    """`Tensor.to` has one tensor among its arguments, and the name of the device that it copies to."""
    x = torch.ones(4, device="sim")
    pinned, pageable = torch.ones(4, pin_memory=True), torch.ones(4)
    device.start_trace()
    tensors = [pageable.to("sim"), pinned.to("sim", non_blocking=True), x.to("cpu"), x.cpu()]
    names = [access.name for access in device.stop_trace() if access.kind == "op"]
    assert names == ["copy_pageable_to_device", "copy_pinned_to_device", *["copy_device_to_pageable"] * 2]
    assert all(tensor.tolist() == [1] * 4 for tensor in tensors)


def pinned_memory_is_kept_for_a_copy() -> None:
    follow("lazy")
    x = torch.ones(4, device="sim")
    host = torch.zeros(4, pin_memory=True)
    address = host.data_ptr()
    host.copy_(x, non_blocking=True)
    del host
    other = torch.zeros(4, pin_memory=True)  # which stays, so that one block alone is free after the copy
    assert other.data_ptr() != address
    torch.accelerator.synchronize()
    assert torch.zeros(4, pin_memory=True).data_ptr() == address


def mixed_devices_are_refused() -> None:
    x, host = torch.ones(4, device="sim"), torch.ones(4)
    operators: list[Callable[[], torch.Tensor]] = [
        lambda: x + host,
        lambda: torch.cat([x, host]),
        lambda: torch.nn.functional.linear(x, host.view(1, 4)),
        lambda: torch.add(x, x, out=host),
    ]
    for operator in operators:
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            operator()
    with pytest.raises(TypeError, match="can't convert sim:0 device type tensor to numpy"):
        x.numpy()
    assert (x * torch.tensor(2.0))[torch.tensor([0, 1])].tolist() == [2, 2], "scalars and indices are taken by value"
    rate = torch.tensor([0.1])
    parameter = torch.ones(4, device="sim", requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam([parameter], lr=rate, fused=True).step()
    assert parameter.tolist() == pytest.approx([0.9] * 4)


def random_numbers_are_those_of_the_cpu() -> None:
    for schedule in ("eager", "lazy", "random:5"):
        follow(schedule)
        drawn = []
        for where in ("cpu", "sim"):
            torch.manual_seed(3)
            tensors = [torch.empty(5, device=where).normal_(), torch.empty(5, device=where).uniform_()]
            drawn.append([tensor.tolist() for tensor in tensors])
        assert drawn[0] == drawn[1]


def a_failure_names_its_operator() -> None:
    follow("lazy")
    x = torch.ones(4, device="sim")
    x.index_add_(0, torch.tensor([9], device="sim"), torch.ones(1, device="sim"))
    with pytest.raises(
        RuntimeError,
        match=r"simulated device: aten::index_add_, queued on stream 0, failed: index out of range in self$",
    ):
        torch.accelerator.synchronize()


def a_trace_has_accesses_and_events() -> None:
    follow("lazy")
    x, host = torch.ones(4, device="sim"), torch.zeros(4, pin_memory=True)
    event = torch.Event(device="sim")
    device.start_trace()
    host.copy_(x, non_blocking=True)
    event.record()
    event.synchronize()
    device.host_access("aten::add", host.data_ptr(), 16, write=False)
    copy, record, wait, read = device.stop_trace()
    ((block, begin, end),) = copy.reads
    ((pinned, pinned_begin, pinned_end),) = copy.writes
    assert (copy.kind, copy.stream, copy.name, end - begin, block > 0) == ("op", 0, "copy_device_to_pinned", 16, True)
    assert (pinned < 0, pinned_begin, pinned_end) == (True, 0, 16)
    assert (record.kind, wait.kind, record.event) == ("record", "host_wait_event", wait.event)
    assert (read.kind, read.reads) == ("host", ((pinned, 0, 16),))


CHECKS = (
    sizes_are_rounded,
    blocks_are_split_and_merged,
    the_best_block_is_taken,
    large_blocks_keep_what_is_small,
    streams_have_pools_of_their_own,
    record_stream_holds_memory,
    memory_ends,
    fresh_memory_is_poison,
    streams_run_in_their_order,
    schedules_differ,
    copies_wait_as_cuda_says,
    copies_to_another_device_are_in_the_trace,
    pinned_memory_is_kept_for_a_copy,
    mixed_devices_are_refused,
    random_numbers_are_those_of_the_cpu,
    a_failure_names_its_operator,
    a_trace_has_accesses_and_events,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_device(check: Callable[[], None]) -> None:
    assert exit_code(check) == 0
