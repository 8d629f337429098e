"""Operators of the simulated device: those that CUDA chooses, with the CPU's numbers in every bit."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from conformance.instruments.dispatch_tap import DispatchTap, Handler
from conformance.numerics import other_kernels
from conformance.numerics.device_operators import fused_norms, has_fused_attention, has_fused_norms
from conformance.sim import device
from conformance.sim.schedules import Schedule
from tests.support.simulated_processes import exit_code

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (4, 6, 8, 12, 64)
RATES = (0.1, 0.3, 0.5)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def computed(
    function: Callable[..., Tensor], *inputs: Tensor, where: str, transposed: bool = False
) -> tuple[list[Tensor], list[str]]:
    """Return output and gradients of a function of tensors, on the CPU, and the operators that were called."""
    leaves = [x.to(where).detach().requires_grad_() for x in inputs]
    names: list[str] = []

    def note(func: Any) -> Handler:
        return lambda _: names.append(func._schema.name.removeprefix("aten::"))

    with DispatchTap([note]):
        out = function(*(leaf.transpose(1, 2) if transposed else leaf for leaf in leaves))
        out.backward(normal(*out.shape, dtype=out.dtype, seed=9).to(where))  # type: ignore[no-untyped-call]
    return [x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves if leaf.grad is not None))], names


def require_equal(measured: list[Tensor], expected: list[Tensor], what: object) -> None:
    assert len(measured) == len(expected), what
    assert all(torch.equal(*pair) for pair in zip(measured, expected, strict=True)), what


def norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def nothing_grows_in_place() -> None:
    """Variants in place of composed operators hand their tensor over as an input and as `out`."""
    device.follow(Schedule.parse("lazy"))
    small, large = torch.ones(1, 2, device="sim"), torch.ones(3, 2, device="sim")
    for call in (small.logical_and_, small.ldexp_, small.add_):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            call(large)
    assert small.shape == (1, 2)
    number, row = torch.ones((), device="sim"), torch.ones(3, device="sim")
    with pytest.raises(RuntimeError):
        number.addr_(row, row)
    assert number.shape == ()


def on_both(call: Callable[[str], Any], schedules: tuple[str, ...] = ("eager", "lazy")) -> None:
    """Require the same tensors of a call on the device as on the CPU: bits, dtypes, sizes, strides, conjugation."""

    def facts(where: str) -> list[Any]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = call(where)
        resizes = [str(each.message) for each in caught if "was resized" in str(each.message)]
        bits = [x.detach().cpu().resolve_conj().tolist() for x in results]
        return [[(x.dtype, x.shape, x.stride(), x.is_conj()) for x in results], bits, len(resizes)]

    expected = facts("cpu")
    for schedule in schedules:
        device.follow(Schedule.parse(schedule))
        assert facts("sim") == expected, schedule


def outputs_are_laid_out_as_on_the_cpu() -> None:
    """Resized outputs, with one warning, and results of an expanded operand in 16 bits have the CPU's strides."""
    image = normal(2, 3, 4, 5, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    waves = normal(3, 4, dtype=torch.complex64).t()

    def resized(where: str) -> list[Tensor]:
        wide, empty = torch.ones(7, device=where), torch.empty(0, device=where, dtype=torch.complex64)
        return [
            torch.cat([image.to(where), image.to(where)], out=wide),
            torch.conj_physical(waves.to(where), out=empty),
            torch.mul(image.to(where), 2, out=torch.empty(0, device=where)),
        ]

    def expanded(where: str) -> list[Tensor]:
        one, columns = torch.ones(1, 1, dtype=torch.bfloat16, device=where), torch.ones(3, 2, device=where).t()
        row, low = one.expand(2, 3), columns.bfloat16()
        return [row * low, low * row, row < low, row < columns.half(), row + columns, low + one, torch.atan2(row, low)]

    on_both(resized)
    on_both(expanded)


def conjugation_of_outputs_is_kept() -> None:
    """LAPACK's solver writes a transposed result and marks it as conjugated, one that was marked before as well."""
    matrix, right = normal(3, 3, dtype=torch.complex64), normal(2, 3, dtype=torch.complex64, seed=1)
    factors, pivots = torch.linalg.lu_factor(matrix)

    def solved(where: str) -> list[Tensor]:
        given = [torch.empty(2, 3, dtype=torch.complex64, device=where) for _ in range(2)]
        for out in (given[0], given[1].conj()):
            torch.linalg.lu_solve(factors.to(where), pivots.to(where), right.to(where), left=False, out=out)
        return [*given, given[0] * 2]

    on_both(solved)


def operands_grow_in_place_as_on_the_cpu() -> None:
    """addbmm_ takes a number to which it adds matrices; other operators refuse it, see `nothing_grows_in_place`."""
    batch = normal(2, 3, 3, dtype=torch.float32)

    def grown(where: str) -> list[Tensor]:
        total = torch.ones((), device=where)
        view = total[None]
        return [total.addbmm_(batch.to(where), batch.to(where)), total + 1, view]

    on_both(grown)


def operators_have_the_dtypes_of_the_cpu() -> None:
    numbers = torch.tensor([[1, 0, 1], [0, 1, 1]])

    def computed_on(where: str) -> list[Tensor]:
        own, flags = numbers.to(where), numbers.bool().to(where)
        mode = torch.mode(own, out=(torch.empty(0, dtype=own.dtype, device=where), torch.empty_like(own)))
        gradients = [torch.ops.aten.native_dropout_backward(x, flags, 2.0) for x in (own, flags, own.bfloat16())]
        return [*mode, *gradients, flags.pow(True), flags.pow(2)]

    on_both(computed_on)


def attention_is_laid_out_as_by_cuda() -> None:
    """Flash attention keeps the layout of its operands, efficient attention has the heads of a row side by side."""

    def strides(dtype: torch.dtype) -> list[tuple[int, ...]]:
        leaves = [normal(2, 3, 16, 8, dtype=dtype, seed=seed).to("sim").requires_grad_() for seed in range(3)]
        out = attend(*leaves)
        return [x.stride() for x in (out, *torch.autograd.grad(out.sum(), leaves))]

    assert set(strides(torch.bfloat16)) == {(384, 128, 8, 1)}
    assert set(strides(torch.float32)) == {(384, 8, 24, 1)}


def autocast_is_that_of_cuda() -> None:
    """The CPU's autocast has other operators, see `autocast` in conformance/sim_runs/operators/reasons.yaml."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    cuda, sim, cpu = (
        {name.removeprefix("aten::") for name in names if has(name, f"Autocast{key}")}
        for key in ("CUDA", "PrivateUse1", "CPU")
    )
    lacking = {name for name in cuda - sim if "cudnn" not in name}
    assert lacking <= {"linalg_matrix_sqrth"}, "torch 2.14 has it first; conformance/sim/csrc/autocast.cpp lacks it"
    assert sim <= cuda
    assert {"addmv", "addr", "einsum", "mv", "bilinear", "tensordot", "log_softmax.int", "softmax.int"} <= cuda - cpu
    assert "pinverse" in cpu - cuda


def norms_are_one_operator() -> None:
    device.follow(Schedule.parse("lazy"))
    for dtype in DTYPES:
        inputs = normal(4, 16, 30, dtype=dtype), normal(30, dtype=dtype, seed=1)
        for given in (inputs, inputs[:1]):
            expected, _ = computed(norm, *given, where="cpu")
            measured, names = computed(norm, *given, where="sim")
            require_equal(measured, expected, (dtype, len(given)))
            assert ("_fused_rms_norm" in names and "_fused_rms_norm_backward" in names) == has_fused_norms(), names


def attention_is_what_cuda_chooses() -> None:
    device.follow(Schedule.parse("lazy"))
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            inputs = [normal(2, 16, 4, head_dim, dtype=dtype, seed=seed) for seed in range(3)]
            is_fused = has_fused_attention(dtype, head_dim=head_dim)
            with nullcontext() if is_fused else sdpa_kernel(SDPBackend.MATH):
                expected, _ = computed(attend, *inputs, where="cpu", transposed=True)
            measured, names = computed(attend, *inputs, where="sim", transposed=True)
            require_equal(measured, expected, (dtype, head_dim))
            kind = "flash" if dtype.itemsize == 2 else "efficient"
            operator = f"_scaled_dot_product_{kind}_attention" if is_fused else "bmm"
            assert operator in names, (dtype, head_dim, names)
            assert is_fused == (f"{operator}_backward" in names)
    assert not device.counts()["waits"]


def masks_of_attention_are_added() -> None:
    """Flash attention takes none; a mask of bools keeps where it is true, in products and a softmax too."""
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            inputs = [normal(2, 4, 16, head_dim, dtype=dtype, seed=seed) for seed in range(3)]
            is_fused = head_dim * dtype.itemsize % 16 == 0

            def attend_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, torch.ones(16, 16, dtype=torch.bool).tril().to(q.device))

            with nullcontext() if is_fused else sdpa_kernel(SDPBackend.MATH):
                expected, _ = computed(attend_masked, *inputs, where="cpu")
            measured, names = computed(attend_masked, *inputs, where="sim")
            require_equal(measured, expected, (dtype, head_dim))
            assert is_fused == ("_scaled_dot_product_efficient_attention" in names), (dtype, head_dim, names)


def switches_of_attention_are_obeyed() -> None:
    inputs = [normal(2, 4, 16, 8, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    torch.backends.cuda.enable_flash_sdp(False)
    assert "_scaled_dot_product_efficient_attention" in computed(attend, *inputs, where="sim")[1]
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    assert "bmm" in computed(attend, *inputs, where="sim")[1]
    for head_dim, rate in ((6, 0.0), (8, 0.5)):
        q = torch.ones(1, 2, 16, head_dim, device="sim")
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=rate)
    with pytest.raises(NotImplementedError, match="no dropout"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.5)


def dropout_is_one_operator_with_a_mask() -> None:
    """The host does not wait for it, and the mask is the same under each schedule."""
    for dtype in DTYPES:
        for rate in RATES:
            drawn = []
            for schedule in ("eager", "lazy", "random:5"):
                device.follow(Schedule.parse(schedule))
                torch.manual_seed(3)
                x = normal(4, 16, 30, dtype=dtype)
                measured, names = computed(lambda x, rate=rate: F.dropout(x, rate), x, where="sim")
                assert [name for name in names if "dropout" in name] == ["native_dropout", "native_dropout_backward"]
                drawn.append(measured[0])
                mask, scale = measured[0] != 0, torch.tensor(1.0 - rate).double().reciprocal().float()
                require_equal(measured[:1], [(x.float() * mask * scale).to(dtype)], (dtype, rate))
                grad = normal(4, 16, 30, dtype=dtype, seed=9)
                require_equal(measured[1:], [(grad.float() * mask * (1.0 / (1.0 - rate))).to(dtype)], (dtype, rate))
            require_equal(drawn[1:], drawn[:1] * 2, "schedules draw other masks")
    assert not device.counts()["waits"]


def kernels_on_lists_have_tables() -> None:
    """The largest is in the statistics of an operator whose results exist already."""
    device.follow(Schedule.parse("lazy"))
    shards = [torch.ones(rows, 8, device="sim") for rows in (64, 3, 65)]  # 2048, 96 and 2080 bytes in fp32
    chunks = torch.empty(2, sum(-(-len(shard) // 2) * 8 for shard in shards), device="sim")
    outs = [torch.empty(2, -(-len(shard) // 2) * 8, device="sim") for shard in shards]

    def peak_bytes(function: Callable[[], object]) -> int:
        before = int(torch.accelerator.memory_stats()["requested_bytes.all.current"])
        torch.accelerator.reset_peak_memory_stats()
        function()
        return int(torch.accelerator.memory_stats()["requested_bytes.all.peak"]) - before

    def norms(tensors: list[Tensor], order: float) -> Callable[[], object]:
        return lambda: torch._foreach_norm(tensors, order)

    cat = torch._chunk_cat
    assert peak_bytes(lambda: cat(shards, 0, 2, out=chunks)) == 8 * (6 * 3 + 2 + 1 + 1 + 1)
    wide = torch.empty(chunks.shape, device="sim", dtype=torch.float32)
    low = [shard.bfloat16() for shard in shards]
    assert peak_bytes(lambda: cat(low, 0, 2, out=wide)) == 8 * (6 * 3 + 2 + 1 + 1 + 1), "a cast is in the kernel"
    split = [out.shape[1] for out in outs]
    assert peak_bytes(lambda: torch.split_with_sizes_copy(chunks, split, 1, out=outs)) == 8 * (4 * 3 + 1 + 3)
    assert torch.equal(torch.cat([out.cpu() for out in outs], 1), chunks.cpu())
    expected = torch._chunk_cat([shard.cpu() for shard in shards], 0, 2)
    assert torch.equal(cat(shards, 0, 2).cpu(), expected)
    assert torch.equal(wide.cpu(), expected)
    results_bytes, large = 3 * 4, torch.ones((1 << 16) + 1, device="sim")
    for order, buffer_bytes in ((2.0, 4), (1.0, 4), (math.inf, 4), (3.0, 0)):
        measured = [number.item() for number in torch._foreach_norm(shards, order)]
        assert measured == [torch.linalg.vector_norm(shard.cpu(), order).item() for shard in shards]
        assert peak_bytes(norms(shards, order)) == results_bytes + 3 * buffer_bytes, order
        two_chunks = results_bytes + 2 * 3 * buffer_bytes
        assert peak_bytes(norms([*shards[:2], large], order)) == two_chunks, order


def losses(scores: Tensor, bias: Tensor) -> Tensor:
    labels = torch.arange(scores.shape[0], device=scores.device) % scores.shape[1]
    loss: Tensor = F.cross_entropy(torch.addmm(bias, scores, scores.mT @ scores), labels)
    return loss


def sums(x: Tensor) -> Tensor:
    batch = torch.bmm(x.view(4, -1, 8), x.view(4, -1, 8).mT).softmax(-1)
    total: Tensor = batch.sum() * x.mean(0).sum() + torch.linalg.vector_norm(x)
    return total


def other_kernels_compute_on_the_device() -> None:
    """Each operator that has another kernel on the CPU has it on the device; without, the numbers are others."""
    functions: dict[Callable[..., Tensor], tuple[Tensor, ...]] = {
        losses: (normal(24, 16, dtype=torch.float32), normal(16, dtype=torch.float32)),
        sums: (normal(48, 8, dtype=torch.float32),),
        attend: tuple(normal(2, 4, 16, 8, dtype=torch.float32, seed=seed) for seed in range(3)),
    }
    device.follow(Schedule.parse("lazy"))
    own = {each: computed(each, *inputs, where="cpu")[0] for each, inputs in functions.items()}
    other_kernels.install(1)
    for each, inputs in functions.items():
        expected, _ = computed(each, *inputs, where="cpu")
        require_equal(computed(each, *inputs, where="sim")[0], expected, each)
        assert not all(torch.equal(*pair) for pair in zip(own[each], expected, strict=True)), each


def layouts_are_inferred_once() -> None:
    """A call like an earlier one has its layouts, and its warnings, without another call on meta tensors."""
    device.follow(Schedule.parse("lazy"))
    x, y = torch.ones(4, 6, device="sim"), torch.ones(6, device="sim")
    whole = torch.ones(3, dtype=torch.int64, device="sim")

    def inferences(call: Callable[[], object]) -> int:
        before = int(device.counts()["inferences"])
        call()
        return int(device.counts()["inferences"]) - before

    def stepped(rate: float) -> Callable[[], object]:
        return lambda: torch._foreach_add_([x, y], [rate, 2 * rate])

    first, second = (inferences(stepped(rate)) for rate in (0.1, 0.2))
    assert first > second == 0, "numbers of each step"
    assert [inferences(lambda: torch.lerp(x, y, 0.5)) for _ in range(3)] == [1, 0, 0]
    assert inferences(lambda: torch.lerp(x.mT.contiguous().mT, y, 0.5)) > 0, "other strides"
    assert [tuple(torch.arange(0.0, end, device="sim").shape) for end in (2.0, 3.0)] == [(2,), (3,)]
    assert torch.true_divide(whole, 2).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    assert torch.true_divide(whole, 2).dtype is torch.float64, "the default dtype of the call"
    torch.set_default_dtype(torch.float32)
    for _ in range(2):
        out = torch.empty(1, device="sim")
        with pytest.warns(UserWarning, match="was resized"):
            torch.mul(x, 2, out=out)
        assert out.shape == x.shape


def overlaps_are_refused_as_on_the_cpu() -> None:
    """The host hears at once that an operator cannot write memory that it reads, and goes on; others overlap."""

    def outcome(call: Callable[[Tensor], object], where: str) -> object:
        x = torch.arange(20.0, device=where)
        try:
            call(x)
        except RuntimeError as error:
            return str(error)
        return x.tolist()

    first, last = slice(0, 12), slice(6, 18)
    calls: tuple[Callable[[Tensor], object], ...] = (
        lambda x: torch.mul(x[first], 2, out=x[last]),
        lambda x: x[last].copy_(x[first]),
        lambda x: x[:1].expand(4).add_(1),
        lambda x: torch._foreach_add_([x[last]], [x[first]]),
        lambda x: torch.cumsum(x[first], 0, out=x[last]),
        lambda x: x[last].index_copy_(0, torch.arange(12, device=x.device), x[first]),
        lambda x: torch.cat([x[:6], x[12:]], out=x[3:17]),
        lambda x: torch.mm(x[:4].view(2, 2), x[4:8].view(2, 2), out=x[2:6].view(2, 2)),
        lambda x: torch._foreach_add_([x[:6], x[6:12]], [x[6:12], x[12:18]]),
        lambda x: x.add_(x),
    )
    device.follow(Schedule.parse("lazy"))
    expected = [outcome(call, "cpu") for call in calls]
    assert [isinstance(each, str) for each in expected] == [True] * 7 + [False] * 3
    for _ in range(2):
        assert [outcome(call, "sim") for call in calls] == expected


def an_interruption_is_no_error_of_a_kernel() -> None:
    """Kernels for meta tensors are Python, in which Ctrl-C may find the host."""

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("cumsum", interrupted, "Meta", allow_override=True)  # type: ignore[no-untyped-call]
    with pytest.raises(KeyboardInterrupt):
        torch.ones(4, device="sim").cumsum(0)


CHECKS = (
    layouts_are_inferred_once,
    overlaps_are_refused_as_on_the_cpu,
    an_interruption_is_no_error_of_a_kernel,
    norms_are_one_operator,
    nothing_grows_in_place,
    outputs_are_laid_out_as_on_the_cpu,
    conjugation_of_outputs_is_kept,
    operands_grow_in_place_as_on_the_cpu,
    operators_have_the_dtypes_of_the_cpu,
    attention_is_laid_out_as_by_cuda,
    autocast_is_that_of_cuda,
    attention_is_what_cuda_chooses,
    masks_of_attention_are_added,
    switches_of_attention_are_obeyed,
    dropout_is_one_operator_with_a_mask,
    kernels_on_lists_have_tables,
    other_kernels_compute_on_the_device,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_operators(check: Callable[[], None]) -> None:
    assert exit_code(check) == 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_norms_of_oracles_are_those_of_torch_in_every_bit(dtype: torch.dtype) -> None:
    inputs = normal(3, 7, 30, dtype=dtype), normal(30, dtype=dtype, seed=1)
    for given in (inputs, inputs[:1]):
        expected, composed = computed(norm, *given, where="cpu")
        norms = fused_norms()
        measured, names = computed(norm, *given, where="cpu")
        del norms
        require_equal(measured, expected, dtype)
        assert ("_fused_rms_norm_backward" in names) == has_fused_norms()
        assert computed(norm, *given, where="cpu")[1] == composed, "the processor has its own operators again"
