"""Tensors of the simulated device in the hands of torch: moves of modules, views, copies, files, autocast."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn

from conformance.sim import device
from conformance.sim.schedules import Schedule
from tests.support.simulated_processes import exit_code


def modules_move_in_place() -> None:
    """Parameters keep their identity, as on CUDA: the optimizer still has them."""
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.LazyLinear(4))
    x = torch.randn(2, 2, 6, 6)
    expected = module(x)
    before = list(module.parameters())
    module.to("sim")
    assert all(one is other for one, other in zip(before, module.parameters(), strict=True))
    assert {parameter.device.type for parameter in before} == {"sim"}
    module[1].load_state_dict(nn.BatchNorm2d(3).state_dict())
    assert torch.equal(module(x.to("sim")).cpu(), expected)
    before[0].data = before[0].data.cpu()
    assert before[0].device.type == "cpu"


def recurrent_networks_compute_the_numbers_of_the_cpu() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        torch.manual_seed(0)
        module = kind(4, 5, num_layers=2)
        x = torch.randn(3, 2, 4)
        module(x)[0].sum().backward()
        other = copy.deepcopy(module).to("sim")
        other.zero_grad()
        other(x.to("sim"))[0].sum().backward()
        for one, another in zip(module.parameters(), other.parameters(), strict=True):
            assert one.grad is not None
            assert another.grad is not None
            torch.testing.assert_close(another.grad.cpu(), one.grad)


def tensors_survive_copies_and_files() -> None:
    x = torch.randn(3, 4).to("sim")[:, 1:]
    assert torch.equal(copy.deepcopy(x), x)
    file = io.BytesIO()
    torch.save({"x": x}, file)
    for where in ("cpu", "sim"):
        file.seek(0)
        loaded = torch.load(file, map_location=where)["x"]
        assert loaded.device.type == where
        assert torch.equal(loaded.cpu(), x.cpu())
    assert x.share_memory_() is x  # type: ignore[no-untyped-call]
    assert not x.is_pinned()
    assert "device='sim:0'" in repr(x)
    torch.testing.assert_close(x, x.clone())
    assert x.is_set_to(x.view(3, 3).view_as(x)) or not x.is_contiguous()


def views_are_views() -> None:
    x = torch.zeros(4, 2, device="sim")
    complex_view = torch.view_as_complex(x)
    complex_view.conj().imag.fill_(2)
    assert x[:, 1].tolist() == [-2.0] * 4
    x.view(torch.int32).zero_()
    assert not x.any()
    x.unfold(0, 2, 2)[0].add_(1)
    assert x.sum().item() == 4


def errors_come_from_the_call() -> None:
    """Wrong arguments are the host's errors, as on a GPU; the queue goes on."""
    x = torch.ones(3, 4, device="sim")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(x, x)
    row = torch.ones(1, 4, device="sim")
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        row.gt_(x)
    assert row.shape == (1, 4)
    with pytest.raises(RuntimeError, match="must match the size"):
        x.add_(torch.ones(5, device="sim"))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(x, x, out=torch.empty(3, 4, device="sim", dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="strided tensors only"):
        x.to_sparse()
    out = torch.empty(2, device="sim")
    with pytest.warns(UserWarning, match="was resized"):
        torch.add(x, 1, out=out)
    assert torch.equal(out.cpu(), torch.full((3, 4), 2.0))


def numbers_promote_as_on_the_cpu() -> None:
    x = torch.arange(4)
    for number in (1.5, True, 2):
        assert (x.to("sim") * number).dtype == (x * number).dtype
        assert torch.equal((x.to("sim") * number).cpu(), x * number)
    half = torch.ones(3, dtype=torch.bfloat16, device="sim")
    assert (half * torch.tensor(0.1, dtype=torch.float64)).dtype == torch.bfloat16


def autocast_follows_the_policies_of_cuda() -> None:
    x = torch.randn(4, 4).to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert F.linear(x, x).dtype == torch.bfloat16
        for function in (torch.exp, lambda y: y.softmax(-1), lambda y: F.layer_norm(y, (4,)), torch.sum):
            assert function(x @ x).dtype == torch.float32
        assert torch.addcmul(x, x.bfloat16(), x).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x.sigmoid(), x.sigmoid())


def norms_have_gradients_in_low_precision() -> None:
    for norm in (nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8)):
        results = []
        for where in ("cpu", "sim"):
            module: Any = copy.deepcopy(norm).to(where, torch.bfloat16)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16().to(where).requires_grad_()
            module(x).square().sum().backward()
            leaves: list[Tensor] = [x, *module.parameters()]
            results.append([leaf.grad.cpu() for leaf in leaves if leaf.grad is not None])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), norm


def fused_optimizers_and_scaling_are_those_of_the_cpu() -> None:
    results = []
    for where in ("cpu", "sim"):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(7).to(where))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        scaler = torch.amp.GradScaler(where, init_scale=8.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(parameter.square().sum()).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([parameter], 0.5)
            scaler.step(optimizer)
            scaler.update()
        results.append(parameter.detach().cpu())
    assert torch.equal(*results)


CHECKS = (
    modules_move_in_place,
    recurrent_networks_compute_the_numbers_of_the_cpu,
    tensors_survive_copies_and_files,
    views_are_views,
    errors_come_from_the_call,
    numbers_promote_as_on_the_cpu,
    autocast_follows_the_policies_of_cuda,
    norms_have_gradients_in_low_precision,
    fused_optimizers_and_scaling_are_those_of_the_cpu,
)


def lazily(check: Callable[[], None]) -> None:
    device.follow(Schedule.parse("lazy"))
    device.poison(True)
    check()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_tensors(check: Callable[[], None]) -> None:
    assert exit_code(lazily, check) == 0
