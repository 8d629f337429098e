"""Trace of streams: accesses of operators, shared storages, and the stub of torch.cpu's streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.instruments import accesses as module
from conformance.instruments.accesses import byte_range, identify, identity_of, require_identities
from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.facts import IssuedOperator, StreamFacts
from conformance.instruments.happens_before import Entry, Operation, Release
from conformance.instruments.streams import StreamTrace


@contextmanager
def traced() -> Iterator[StreamTrace]:
    """Open a context with streams on the CPU that are traced, until the trace is read."""
    trace = StreamTrace(0)
    trace.phase("data", step=0)
    with trace.installed(), DispatchTap([], outcomes=[trace.listen]):
        yield trace


def accessed(trace: StreamTrace, *tensors: Tensor) -> list[tuple[str, list[tuple[int, int, int, bool]]]]:
    """Return each operator and its accesses, with storages as positions in `tensors`, -1 for another."""
    positions = {identity_of(tensor): position for position, tensor in enumerate(tensors)}
    return [
        (entry.operator, [(positions.get(a.storage, -1), a.start, a.stop, a.writes) for a in entry.accesses])
        for entry in trace.entries
        if isinstance(entry, Operation)
    ]


def test_operators_read_and_write_what_their_schema_says() -> None:
    a, b, out = torch.ones(4), torch.ones(4), torch.empty(8)
    with traced() as trace:
        c = a + b
        c.add_(a)
        torch.cat([a, b], out=out)
        torch._foreach_mul_([a, b], 2.0)
    assert accessed(trace, a, b, c, out) == [
        ("aten::add", [(0, 0, 16, False), (1, 0, 16, False), (2, 0, 16, True)]),
        ("aten::add_", [(2, 0, 16, True), (0, 0, 16, False)]),
        ("aten::cat", [(0, 0, 16, False), (1, 0, 16, False), (3, 0, 32, True)]),
        ("aten::_foreach_mul_", [(0, 0, 16, True), (1, 0, 16, True)]),
    ]


def test_views_and_new_memory_are_no_access() -> None:
    with traced() as trace:
        empty = torch.empty(4, 4)
        torch.split(empty.view(16), [4, 12])
        empty.t().detach()
        torch.ops.aten._unsafe_view(empty, [16])
        torch.empty_like(empty)
        torch.empty(0).add_(1)
    assert accessed(trace) == [("aten::add_", [(-1, 0, 0, True)])]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda t: t, (0, 64)),
        (lambda t: t[1], (16, 32)),
        (lambda t: t[:, 1], (4, 56)),
        (lambda t: t[1:3, 1:3], (20, 44)),
        (lambda t: t[1].double(), (0, 32)),
        (lambda t: t[0, :1].expand(4), (0, 4)),
    ],
)
def test_bytes_of_views(view: Any, expected: tuple[int, int]) -> None:
    assert byte_range(view(torch.ones(4, 4))) == expected


def test_what_torch_does_not_declare_is_known(mesh: DeviceMesh) -> None:
    a, out = torch.ones(4), torch.ones(4)
    with traced() as trace:
        torch.ops.fsdp.all_gather_copy_in([a], out, [4], 4, 0)
        torch.distributed.all_gather_into_tensor(out, a, group=mesh.get_group())
        torch.distributed.reduce_scatter_tensor(out, a, group=mesh.get_group())
        torch.distributed.all_reduce(a, group=mesh.get_group())
    written = [
        ("write" if writes else "read", storage)
        for operator, found in accessed(trace, a, out)
        if operator != "aten::copy_"  # gloo copies the result of a reduce-scatter
        for storage, *_, writes in found
    ]
    assert written == [("read", 0), ("write", 1), ("write", 1), ("read", 0), ("write", 1), ("read", 0), ("write", 0)]


def test_every_writing_collective_says_what_it_writes() -> None:
    """A collective that a new torch adds would be seen to read alone."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
    operators = [getattr(torch.ops.c10d, name.partition("::")[2].partition(".")[0]).default for name in names]
    silent = {
        found.operator
        for operator in operators
        if (found := module.accessed_tensors(operator)) and not any(writes for *_, writes in found.slots)
    }
    assert silent <= {"c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan"} | {"c10d::send"}


def test_a_storage_keeps_its_number_and_no_other_gets_it() -> None:
    """An address is used again for other storages, and so is that of the C++ object of a storage."""
    entries: list[Entry] = []
    numbers, addresses, objects = set(), set(), set()
    for number in range(100):
        tensor = torch.empty(1000)
        assert identity_of(tensor) is None
        identify(tensor, number, entries)
        view = tensor[1:].view(27, 37)
        del tensor
        numbers.add(identity_of(view))
        addresses.add(view.data_ptr())
        objects.add(view.untyped_storage()._cdata)
        assert entries == [Release(n) for n in range(number)]
        del view
    assert numbers == set(range(100))
    assert len(addresses) < 100
    assert len(objects) < 100, "as an identity, it would join storages that have nothing to do with each other"


def test_the_end_of_a_storage_that_no_operator_made_is_noted() -> None:
    """A backend's own memory is first seen as an argument: gloo copies the result of a reduce-scatter from there."""
    made_elsewhere = torch.ones(3)
    with traced() as trace:
        torch.zeros(3).copy_(made_elsewhere)
        number = identity_of(made_elsewhere)
        del made_elsewhere
    assert number is not None
    assert Release(number) in trace.entries


def test_a_torch_that_forgets_attributes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "identity_of", lambda _: None)
    with pytest.raises(RuntimeError, match=r"torch .* a storage forgets its attributes"):
        require_identities()


def on_two_streams(*, waits: bool) -> StreamFacts:
    """Return the trace of a sum on a second stream."""
    device: Any = torch.cpu
    with traced() as trace:
        side = device.Stream(priority=-1)
        with device.stream(side):
            total = torch.ones(3).sum()
            assert device.current_stream() is side
        if waits:
            device.current_stream().wait_stream(side)
        total += 1
    return trace.facts()


def test_a_missing_wait_is_reported_with_both_places() -> None:
    assert on_two_streams(waits=True) == StreamFacts({"side": 2, "default stream": 1}, 1, [])
    facts = on_two_streams(waits=False)
    (pair,) = facts.unordered
    assert (pair.first.operator, pair.first.stream) == ("aten::sum", "side")
    assert (pair.second.operator, pair.second.stream) == ("aten::add_", "default stream")
    for issued in cast("list[IssuedOperator]", [pair.first, pair.second]):
        assert issued.stack[0].startswith("tests/fast/instruments/test_streams.py:")
        assert issued.stack[0].endswith(" on_two_streams")


@pytest.mark.parametrize("record_late", [False, True])
def test_events_order_what_was_issued_before_they_were_recorded(record_late: bool) -> None:
    device: Any = torch.cpu
    with traced() as trace:
        stream, event = device.Stream(), device.Event(enable_timing=False)
        event.record(stream)
        with device.stream(stream):
            tensor = torch.ones(3)
        if record_late:
            assert stream.record_event(event) is event
        event.wait()
        tensor.add_(1)
        assert stream.query()
        assert event.query()
    assert len(trace.facts().unordered) == (0 if record_late else 1)


@pytest.mark.parametrize("synchronize", ["stream", "event", "device"])
def test_the_host_can_wait(synchronize: str) -> None:
    device: Any = torch.cpu
    with traced() as trace:
        stream = device.Stream()
        with device.stream(stream):
            tensor = torch.ones(3)
        event = stream.record_event()
        {"stream": stream.synchronize, "event": event.synchronize, "device": device.synchronize}[synchronize]()
        tensor.add_(1)
    assert trace.facts().unordered == []


def test_what_the_host_reads_orders_nothing() -> None:
    device: Any = torch.cpu
    with traced() as trace:
        with device.stream(device.Stream()):
            tensor = torch.ones(())
            tensor.item()
        tensor.add_(1)
    assert {pair.first.operator for pair in trace.facts().unordered} == {"aten::ones", "aten::_local_scalar_dense"}


def test_only_one_step_is_traced_and_the_optimizer_before_it() -> None:
    trace = StreamTrace(2)
    seen = []
    with trace.installed(), DispatchTap([], outcomes=[trace.listen]):
        for step in range(4):
            for phase in ("data", "forward", "backward", "optimizer", "idle"):
                trace.phase(phase, step=step)
                before = len(trace.entries)
                torch.ones(2).add_(1)
                if len(trace.entries) > before:
                    seen.append((step, phase))
    assert seen == [(1, "optimizer"), (1, "idle"), *((2, p) for p in ("data", "forward", "backward", "optimizer"))]


def test_torch_gets_its_streams_back() -> None:
    before = dict(vars(torch.cpu))
    with traced():
        assert torch.cpu.Stream is not before["Stream"]
    assert vars(torch.cpu) == before


def test_fully_shard_uses_the_streams_of_the_cpu(mesh: DeviceMesh) -> None:
    """Its streams have the names that FSDP gives them, and a world of one rank needs but one of them."""
    model = torch.nn.Linear(4, 4)
    with traced() as trace:
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
    facts = trace.facts()
    assert facts.operators.keys() == {"default stream", "reduce_scatter_stream"}
    assert facts.waits > 0
    assert facts.unordered == []
