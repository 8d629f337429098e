"""Operators as the dispatch tap sees them: collectives and their log, operands of sums, and delays."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.instruments import delays as module
from conformance.instruments.collectives import CollectiveLog, collective_kind
from conformance.instruments.delays import EVERY, KINDS, delays
from conformance.instruments.dispatch_tap import DispatchTap, Handler
from conformance.instruments.operators import Operands, with_operands


def test_dispatch_tap_sees_local_tensors_of_dtensors(mesh: DeviceMesh) -> None:
    seen: list[tuple[str, tuple[type, ...]]] = []
    asked: list[Any] = []

    def listen(func: Any) -> Handler:
        asked.append(func)
        name = func._schema.name
        return lambda args: seen.append((name, tuple(type(arg) for arg in args if isinstance(arg, Tensor))))

    left = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    right = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    with DispatchTap([listen]):
        product = left @ right
        left @ right
    assert isinstance(product, DTensor)
    assert seen.count(("aten::mm", (Tensor, Tensor))) == 2
    assert asked.count(torch.ops.aten.mm.default) == 1
    assert all(DTensor not in kinds for _, kinds in seen)
    seen.clear()
    left @ right
    assert seen == []


def test_unawaited_results_are_seen_as_plain_tensors(mesh: DeviceMesh) -> None:
    """The second of two reductions, over two mesh dimensions, gets the unawaited result of the first."""
    seen: list[str] = []
    pending = all_reduce(torch.ones(2), "sum", mesh)
    assert type(pending) is not Tensor
    with DispatchTap([lambda _: None, lambda func: lambda _: seen.append(func._schema.name)]):
        total = all_reduce(pending, "sum", mesh) + 0
    assert total.tolist() == [1.0, 1.0]
    assert seen.count("_c10d_functional::all_reduce") == 1


def operators() -> list[str]:
    """Return the names of all operators of c10d that this torch has."""
    schemas = torch._C._jit_get_all_schemas()
    names = {schema.name for schema in schemas}
    return sorted(name for name in names if name.startswith(("c10d::", "_c10d_functional::")))


@pytest.mark.parametrize("operator", operators())
def test_the_kind_of_every_operator_is_known(operator: str) -> None:
    name = operator.partition("::")[2].replace("_", "")
    kind = collective_kind(operator)
    if kind is None:
        assert any(word in name for word in ("wait", "wrap", "send", "recv", "p2p", "nan", "monitored")), operator
    else:
        assert kind.replace("_", "") in name


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("c10d::scatter_", "scatter"),
        ("c10d::gather_", "gather"),
        ("c10d::reduce_", "reduce"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::send", None),
        ("_c10d_functional::all_reduce_coalesced", "all_reduce"),
        ("_c10d_functional::wait_tensor", None),
    ],
)
def test_kinds_of_collectives(operator: str, kind: str | None) -> None:
    assert collective_kind(operator) == kind
    with pytest.raises(RuntimeError, match="unknown collective c10d::teleport_"):
        collective_kind("c10d::teleport_")


def test_collective_log(mesh: DeviceMesh) -> None:
    log = CollectiveLog()
    tensor = torch.ones(6, dtype=torch.bfloat16)
    with DispatchTap([log.listen]) as tap:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        log.phase("forward", step=2)
        dist.all_gather([torch.empty(3)], torch.ones(3), group=mesh.get_group())
        with tap.paused():
            dist.all_reduce(tensor)
        dist.broadcast(torch.ones(2, dtype=torch.int64), src=0)
        torch.ones(2).add(1)
    collectives = [(c.step, c.phase, c.kind, c.numel, c.nbytes, c.dtype, c.reduce_op) for c in log.facts(mesh)]
    assert collectives == [
        (-1, "build", "all_reduce", 6, 12, "bfloat16", "MAX"),
        (2, "forward", "all_gather", 3, 12, "float32", None),
        (2, "forward", "broadcast", 2, 16, "int64", None),
    ]
    assert {collective.group for collective in log.facts(mesh)} == {"dp_shard"}


# Operands


if TYPE_CHECKING:
    from reference_trainer.observer import Phase


def seen_operands(*tensors: Tensor, function: Callable[..., Tensor] = torch.mm) -> set[str]:
    return with_operands(lambda: function(*tensors))[1]


def test_dtypes_shapes_and_strides_are_told() -> None:
    left, right = torch.ones(3, 2), torch.ones(4, 2)
    assert seen_operands(left, right.T) == {"aten::mm float32[3, 2](2, 1) float32[2, 4](1, 2)"}
    assert seen_operands(left.bfloat16(), right.T.bfloat16()) == {"aten::mm bfloat16[3, 2](2, 1) bfloat16[2, 4](1, 2)"}


def test_cuts_of_a_wider_tensor_are_told_from_copies() -> None:
    wide, other = torch.ones(2, 8), torch.ones(5, 1)
    cut = wide[:, 3:]
    assert seen_operands(cut, other) == {"aten::mm float32[2, 5](8, 1)+12 float32[5, 1](1, 1)"}
    assert seen_operands(cut.contiguous(), other) == {"aten::mm float32[2, 5](5, 1) float32[5, 1](1, 1)"}


def test_operators_that_add_nothing_up_and_integers_are_left_out() -> None:
    x = torch.ones(4, 4)
    assert seen_operands(x, function=lambda x: x * x + x.exp()) == set()
    assert seen_operands(x > 0, function=torch.sum) == set()


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), id="attention"),
        pytest.param(lambda x: F.log_softmax(x, -1), id="log-softmax"),
        pytest.param(lambda x: x.mean(-1), id="mean"),
        pytest.param(lambda x: x @ x.mT, id="product"),
    ],
)
def test_what_adds_up_is_seen(function: Callable[[Tensor], Tensor]) -> None:
    assert seen_operands(torch.ones(2, 2, 4, 8), function=function)


def test_backward_is_seen_as_well() -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    x = torch.ones(3, 4)
    _, seen = with_operands(lambda: torch.autograd.grad((x @ weight).sum(), weight))
    assert "aten::mm float32[4, 3](1, 4) float32[3, 2](0, 0)" in seen


def test_only_forward_and_backward_of_the_first_step_count() -> None:
    operands = Operands()
    add_up = operands.listen(torch.ops.aten.sum.default)
    assert add_up is not None
    phases: list[tuple[Phase, int]] = [("build", -1), ("data", 3), ("forward", 3), ("backward", 3), ("clip", 3)]
    phases += [("forward", 4), ("backward", 4)]
    for size, (phase, step) in enumerate(phases):
        operands.phase(phase, step=step)
        add_up([torch.ones(size)])
    assert operands.noted == {"aten::sum float32[2](1,)", "aten::sum float32[3](1,)"}


# Delays


OPERATORS = 100 * EVERY


def delayed_additions(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, *, sleeps: bool = True) -> list[int]:
    """Return the numbers of those among many additions before which a rank on the CPU sleeps."""
    numbers: list[int] = []
    with monkeypatch.context() as patch, delays(kinds, device=torch.device("cpu"), sleeps=sleeps):
        for number in range(OPERATORS):
            patch.setattr("time.sleep", lambda _, number=number: numbers.append(number))
            torch.ones(2) + 1
    return numbers


@pytest.fixture
def additions_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kind", lambda func, *_: "copy" if func._schema.name == "aten::add" else None)


@pytest.mark.usefixtures("additions_are_copies")
def test_the_rank_that_sleeps_is_delayed_at_first_and_then_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = delayed_additions(("copy",), monkeypatch)
    assert numbers[0] == 0
    assert OPERATORS / EVERY / 2 < len(numbers) < OPERATORS / EVERY * 2
    assert delayed_additions(("copy",), monkeypatch) == numbers
    assert delayed_additions(("copy",), monkeypatch, sleeps=False) == []
    assert delayed_additions(("all_gather",), monkeypatch) == []


@pytest.mark.usefixtures("additions_are_copies")
@pytest.mark.parametrize("each_step", range(2, 17))
def test_each_operator_of_a_step_is_delayed_sometime(monkeypatch: pytest.MonkeyPatch, each_step: int) -> None:
    """Delays must not be in step with the operators of a training step, however many it has."""
    assert {number % each_step for number in delayed_additions(("copy",), monkeypatch)} == set(range(each_step))


def operator(name: str) -> Any:
    return SimpleNamespace(namespace=name.partition("::")[0], _schema=SimpleNamespace(name=name))


def test_kinds_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._kind(operator("c10d::_allgather_base_"), (), {}) == "all_gather"
    assert module._kind(operator("_c10d_functional::all_reduce"), (), {}) == "all_reduce"
    assert module._kind(operator("c10d::send"), (), {}) == "transfer"
    assert module._kind(operator("c10d::recv_"), (), {}) == "transfer"
    assert module._kind(operator("c10d::barrier"), (), {}) not in KINDS
    assert delayed_additions(KINDS, monkeypatch) == [], "an addition is of no kind"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: x.to("meta"), ["copy"]),
        (lambda x: x.to(torch.device("meta"), non_blocking=True), ["copy"]),
        (lambda x: x.to("meta", torch.bfloat16), ["copy"]),
        (lambda x: torch.empty(2, device="meta").copy_(x), ["copy"]),
        (lambda x: x.to(torch.bfloat16), []),
        (lambda x: x.to("cpu", copy=True), []),
        (lambda x: torch.empty(2).copy_(x), []),
    ],
)
def test_what_moves_a_tensor_to_another_device_is_a_copy(
    change: Callable[[Tensor], Tensor], expected: list[str]
) -> None:
    """Offloaded gradients are moved by `Tensor.to`, whose operator has one tensor among its arguments."""
    seen: list[str | None] = []

    def listen(func: Any) -> Any:
        return lambda args, kwargs: seen.append(module._kind(func, args, kwargs))

    with DispatchTap([], before=[listen]):
        change(torch.ones(2))
    assert [kind for kind in seen if kind] == expected


def test_a_torch_that_cannot_delay_a_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep", raising=False)
    with pytest.raises(RuntimeError, match=r"has no torch.cuda._sleep: see conformance/instruments/delays.py"):
        delays(KINDS, device=torch.device("cuda"), sleeps=True)
