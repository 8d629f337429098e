"""Runs whose numbers are not finite: how they end, and which step and module they name."""

import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from reference_trainer.config import ModelConfig, load_config
from reference_trainer.init_weights import init_weights
from reference_trainer.model import Transformer
from reference_trainer.nonfinite import NonFiniteError, NonFiniteWatch
from reference_trainer.train import StepMetrics
from tests.sessions.reference_trainer.test_cli import TINY, numbers, rows_of, run_ranks, trained_here

NAN_IN = "layers.1.attention.wk.weight"
FROM_NAN = "parameters of layers.1.attention were not finite before the step (1 of 11 modules)"
NO_WARMUP = ["--set", "optimizer.warmup_steps=0"]


@pytest.fixture
def weights(tmp_path: Path) -> list[str]:
    """Options of a run whose initial weights hold one NaN, in the last row of a weight."""
    model = Transformer(load_config(TINY).model)
    init_weights(model, seed=0)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors[NAN_IN][-1, -1] = math.nan
    save_file(tensors, tmp_path / "weights.safetensors")
    return ["--set", "init=checkpoint", "--set", f"checkpoint={tmp_path / 'weights.safetensors'}"]


def test_all_ranks_end_with_status_1_and_rank_0_names_step_and_module(weights: list[str], tmp_path: Path) -> None:
    """The NaN is in a shard of rank 1."""
    metrics, saves = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    outputs = ["--metrics", str(metrics), "--save-every", "1", "--save-dir", str(saves)]
    first, second = run_ranks([*weights, *outputs], world_size=2, directory=tmp_path)
    assert (first.returncode, second.returncode) == (1, 1)
    problem = "step 0: the loss is nan, the gradient norm nan"
    assert first.stderr == f"reference_trainer: {problem}; {FROM_NAN}\n"
    assert second.stdout == second.stderr == ""
    assert [(row["loss"], row["grad_norm"]) for row in rows_of(metrics)] == [(None, None)]
    assert not list(saves.iterdir())


def test_error_if_nonfinite_names_step_and_module_too(weights: list[str], tmp_path: Path) -> None:
    options = ["--set", "optimizer.error_if_nonfinite=true", "--metrics", str(tmp_path / "metrics.jsonl")]
    result = trained_here(*weights, *options)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("reference_trainer: step 0: gradients are not finite: their norm is nan on rank 0.")
    assert line.endswith(FROM_NAN)


def test_earlier_checkpoints_are_completed(tmp_path: Path) -> None:
    saves = ["--save-every", "1", "--save-async", "--save-dir", str(tmp_path / "checkpoints")]
    diverging = [*NO_WARMUP, "--set", "optimizer.lr=1e37", "--metrics", str(tmp_path / "metrics.jsonl")]
    result = trained_here(*saves, *diverging)
    assert result.returncode == 1
    assert result.stderr.startswith("reference_trainer: step 1: the loss is ")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_parameters_that_the_last_step_made_infinite_are_not_saved(tmp_path: Path) -> None:
    saves = ["--save-every", "9", "--save-dir", str(tmp_path / "checkpoints")]
    sgd = ["--set", "optimizer.name=sgd", "--set", "optimizer.max_norm=0", "--set", "optimizer.lr=3e38"]
    options = [*NO_WARMUP, "--set", "steps=1", "--set", "model.init_std=1"]
    result = trained_here(*saves, *sgd, *options, "--metrics", str(tmp_path / "metrics.jsonl"))
    assert result.returncode == 1
    assert result.stderr.startswith("reference_trainer: step 0: the optimizer made parameters of ")
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_step_that_is_skipped_for_the_loss_scale_does_not_end_a_run(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    fp16 = ["--set", "precision=fp16-mp", "--set", f"loss_scale.initial={2.0**40}"]
    result = trained_here(*fp16, "--set", "steps=2", "--metrics", str(metrics))
    assert (result.returncode, result.stderr) == (0, "")
    assert [(row["skipped"], row["grad_norm"]) for row in rows_of(metrics)] == [(True, None)] * 2
    assert all(math.isfinite(loss) for loss in numbers(rows_of(metrics), "loss"))


# --- the watch -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(mesh: DeviceMesh) -> Transformer:
    """Model whose parameters are 1, and whose gradients are 2."""
    model = Transformer(ModelConfig(vocab_size=13, dim=16, ffn_dim=24, max_seq_len=8))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.full_like(parameter, 2.0)
    return model


def gradient(model: Transformer, name: str) -> torch.Tensor:
    grad = model.get_parameter(name).grad
    assert grad is not None
    return grad


def watch_of(model: Transformer) -> NonFiniteWatch:
    watch = NonFiniteWatch(torch.device("cpu"))
    watch.gradients(model, step=7)
    return watch


def metrics_of(*, loss: float = 1.0, norm: float = 1.0, skipped: bool = False) -> StepMetrics:
    return StepMetrics(step=7, loss=loss, grad_norm=norm, valid_tokens=1, lr=0.1, skipped=skipped)


def message(model: Transformer, metrics: StepMetrics) -> str:
    with pytest.raises(NonFiniteError) as caught:
        watch_of(model).require_finite(metrics)
    return str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gradients_are_named_in_the_order_of_backward(model: Transformer, value: float) -> None:
    for name in ("tok_embeddings.weight", "layers.0.ffn_norm.weight"):
        gradient(model, name).view(-1)[3] = value
    assert message(model, metrics_of(norm=value)) == (
        f"step 7: the loss is 1, the gradient norm {value}; parameters were finite, gradients of layers.0.ffn_norm are "
        "not, first in the order of backward (2 of 11 modules)"
    )


def test_parameters_are_named_in_the_order_of_forward_and_before_gradients(model: Transformer) -> None:
    for name in ("output.weight", "layers.1.feed_forward.w2.weight"):
        model.get_parameter(name).data.view(-1)[3] = math.nan
    gradient(model, "output.weight").fill_(math.nan)
    assert message(model, metrics_of(loss=math.nan)).endswith(
        "; parameters of layers.1.feed_forward were not finite before the step (2 of 11 modules)"
    )


def test_a_norm_that_overflows_by_itself_names_the_largest_gradient(model: Transformer) -> None:
    gradient(model, "layers.1.attention.wo.weight")[0, 0] = -1e30
    assert message(model, metrics_of(norm=math.inf)) == (
        "step 7: the loss is 1, the gradient norm inf; parameters and gradients are finite, the largest gradient is "
        "1e+30, of layers.1.attention"
    )


def test_clipping_and_the_optimizer_do_not_hide_where_it_began(model: Transformer) -> None:
    gradient(model, "norm.weight")[0] = math.nan
    watch = watch_of(model)
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
        parameter.grad = None
    with pytest.raises(NonFiniteError, match=r"parameters were finite, gradients of norm are not"):
        watch.require_finite(metrics_of(norm=math.nan))


@pytest.mark.parametrize(
    ("metrics", "ends"),
    [
        (metrics_of(), False),
        (metrics_of(norm=math.inf, skipped=True), False),
        (metrics_of(norm=math.nan, skipped=True), False),
        (metrics_of(loss=math.nan, skipped=True), True),
        (metrics_of(loss=math.inf), True),
        (metrics_of(norm=math.nan), True),
    ],
)
def test_only_the_norm_of_a_skipped_step_may_be_anything(model: Transformer, metrics: StepMetrics, ends: bool) -> None:
    with pytest.raises(NonFiniteError) if ends else nullcontext():
        watch_of(model).require_finite(metrics)


def test_parameters_after_a_step_are_named(model: Transformer) -> None:
    watch = watch_of(model)
    watch.require_finite_parameters(model, step=7)
    model.get_parameter("layers.0.attention.wv.weight").data[1, 1] = math.inf
    with pytest.raises(NonFiniteError) as caught:
        watch.require_finite_parameters(model, step=7)
    expected = "step 7: the optimizer made parameters of layers.0.attention not finite (1 of 11 modules)"
    assert str(caught.value) == expected
