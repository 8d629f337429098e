"""Replayed dropout equals torch's with the same masks, in every bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.dropout_masks import DropoutMasks
from conformance.oracles.dropout import replay
from conformance.oracles.tolerance import dropped_share
from reference_trainer.config import ModelConfig
from reference_trainer.init_weights import init_weights
from reference_trainer.model import Transformer
from reference_trainer.parallelize import apply_compile

CONFIG = ModelConfig(vocab_size=31, dim=16, n_layers=2, ffn_dim=24, max_seq_len=8, dropout=0.25)


@pytest.fixture(autouse=True)
def no_graphs_left() -> Iterator[None]:
    """Forget compiled graphs: `layer` of a block would be compiled anew in other tests of the process."""
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_replayed_masks_give_the_same_logits_and_gradients(dtype: torch.dtype, traced: bool) -> None:
    model, plain = Transformer(CONFIG), Transformer(CONFIG)
    for each in (model, plain):
        init_weights(each, seed=1)
        each.to(dtype)
    for block in model.blocks.values():
        if traced:
            apply_compile(block, backend="aot_eager")
    tokens = torch.arange(16).view(2, 8)
    recorder = DropoutMasks()

    def computed(model: Transformer) -> list[Tensor]:
        logits: Tensor = model(tokens)
        return [logits, *torch.autograd.grad(logits.float().logsumexp(-1).sum(), list(model.parameters()))]

    with DispatchTap([recorder.listen], outcomes=[recorder.listen_to_outcomes]):
        recorder.phase("forward", step=0)
        drawn = computed(model)
    masks = [recorder.tensors[f"step0/dropout/forward/0/{call}"] for call in range(4)]
    assert len(recorder.tensors) == 4
    assert all(mask.shape == (2, 8, 16) and mask.dtype == torch.bool for mask in masks)
    replay(plain, masks, rounding="traced" if traced else "processor")
    assert all(torch.equal(a, b) for a, b in zip(computed(plain), drawn, strict=True))


def test_each_micro_batch_and_step_has_masks_of_its_own() -> None:
    recorder, x = DropoutMasks(), torch.ones(4)
    with DispatchTap([recorder.listen]):
        torch.nn.functional.dropout(x)
        for step, phase in ((0, "forward"), (0, "backward"), (0, "forward"), (1, "forward")):
            recorder.phase(phase, step=step)  # type: ignore[arg-type]
            torch.nn.functional.dropout(x)
    assert list(recorder.tensors) == [
        "step0/dropout/forward/0/0",
        "step0/dropout/backward/0/0",
        "step0/dropout/forward/1/0",
        "step1/dropout/forward/0/0",
    ]


def test_the_share_of_a_fair_sample_is_within_its_bound_and_another_is_not() -> None:
    torch.manual_seed(0)
    share = float((torch.rand(10_000) < 0.1).double().mean())
    assert abs(share - 0.1) < dropped_share(0.1, samples=10_000) < 0.03
