"""Experts: the mixture computes each token by its experts alone, and balances all tokens; options that it refuses."""

from functools import partial

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from conformance.numerics.rings import GLOO_RING
from conformance.oracles.reference import initial_model
from conformance.oracles.virtual_ep import ExpertParallelForward, joined_experts
from conformance.oracles.virtual_tp import TensorParallelForward
from conformance.plan.cells import Cell
from reference_trainer.checks import UsageError
from reference_trainer.config import MeshConfig
from reference_trainer.data import Batches
from reference_trainer.experts import MixtureOfExperts
from reference_trainer.init_weights import normal
from reference_trainer.loss import with_balance
from reference_trainer.parallel_dims import check_fits_mesh, resolve_mesh
from reference_trainer.parallelize import apply_ac

CONFIG = Cell(mesh="dp1", model="experts").config


def mixture() -> MixtureOfExperts:
    return initial_model(CONFIG).double().mixtures[0]


def by_token(network: MixtureOfExperts, x: Tensor) -> Tensor:
    """Return the output for one token, shape (dim,), from the formulas of the papers."""
    probabilities = (network.router.weight @ x).softmax(0)
    chosen = probabilities.argsort(descending=True)[: CONFIG.model.experts_per_token]
    out: Tensor = network.shared(x.view(1, 1, -1)).flatten()
    for expert in chosen:
        w1, w2, w3 = (weight[expert] for weight in (network.experts.w1, network.experts.w2, network.experts.w3))
        out = out + probabilities[expert] / probabilities[chosen].sum() * (w2 @ (functional.silu(w1 @ x) * (w3 @ x)))
    return out


def test_each_token_passes_its_experts() -> None:
    network, x = mixture(), normal((2, 5, CONFIG.model.dim), name="x", seed=0).double()
    expected = torch.stack([by_token(network, token) for token in x.flatten(0, 1)]).view_as(x)
    torch.testing.assert_close(network(x), expected)


def test_equal_probabilities_cost_the_weight_for_each_token() -> None:
    network = mixture()
    with torch.no_grad():
        network.router.weight.zero_()
        network(normal((2, 5, CONFIG.model.dim), name="x", seed=0).double())
    assert network.balance_loss is not None
    assert float(network.balance_loss) == pytest.approx(10 * CONFIG.model.balance_weight)


def test_backward_that_recomputes_leaves_the_balance_loss() -> None:
    """The loss of a recomputed forward would keep, by its graph, all that was recomputed for it."""
    model = initial_model(CONFIG)
    for block in model.blocks.values():
        apply_ac(block, mode="full")
    tokens, _ = Batches(CONFIG.data, vocab_size=CONFIG.model.vocab_size, seed=0).global_batch(0)
    logits = model(tokens)
    losses = [mixture.balance_loss for mixture in model.mixtures]
    (logits.sum() + model.balance_loss()).backward()
    assert all(mixture.balance_loss is loss for mixture, loss in zip(model.mixtures, losses, strict=True))
    model(tokens)
    assert not any(mixture.balance_loss is loss for mixture, loss in zip(model.mixtures, losses, strict=True))


@torch.no_grad()
def test_ranks_in_lockstep_balance_all_tokens() -> None:
    model = initial_model(CONFIG).double()
    tokens, _ = Batches(CONFIG.data, vocab_size=CONFIG.model.vocab_size, seed=0).global_batch(0)
    model(tokens)
    expected = float(model.balance_loss())
    forward = ExpertParallelForward(model, ranks=2, ep=1)
    forward.losses([partial(own, half) for own, half in zip(forward.models, tokens.chunk(2), strict=True)])
    losses = [float(own.balance_loss()) for own in forward.models]
    assert sum(losses) == pytest.approx(expected)
    assert losses[0] != pytest.approx(losses[1])


def test_ranks_that_divide_experts_compute_what_each_does_alone() -> None:
    model = initial_model(CONFIG).double()
    tokens, _ = Batches(CONFIG.data, vocab_size=CONFIG.model.vocab_size, seed=0).global_batch(0)
    forward = ExpertParallelForward(model, ranks=4, ep=2)
    logits = forward.losses([partial(own, part) for own, part in zip(forward.models, tokens.chunk(4), strict=True)])
    torch.testing.assert_close(torch.cat(logits), model(tokens))
    expected = torch.autograd.grad(model(tokens).square().sum(), model.mixtures[0].experts.w1)[0]
    halves = [rank.mixtures[0].experts.w1 for rank in forward.models]
    gradients = torch.autograd.grad(torch.cat(logits).square().sum(), halves)
    joined = joined_experts([{"0.experts.w1": gradient} for gradient in gradients], ep=2)
    torch.testing.assert_close(sum(each["0.experts.w1"] for each in joined), expected)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_parts_of_experts_compute_what_one_process_does(sequence_parallel: bool) -> None:
    """Loss and gradients of the router, of the balance loss alone, and of an expert, from the parts of two ranks."""
    model = initial_model(CONFIG).double()
    tokens, _ = Batches(CONFIG.data, vocab_size=CONFIG.model.vocab_size, seed=0).global_batch(0)
    mixture = model.mixtures[0]
    logits = model(tokens)
    leaves = [mixture.router.weight, mixture.experts.w2]
    expected = torch.autograd.grad(logits.square().mean() + model.balance_loss(), leaves)
    parts = TensorParallelForward(model, tp=2, ring=GLOO_RING, sequence_parallel=sequence_parallel)
    copies = parts.copied["layers.0.feed_forward.router.weight"]
    torch.testing.assert_close(parts(tokens), logits)
    loss = parts(tokens).square().mean() + model.balance_loss()
    first, second, experts = torch.autograd.grad(loss, [*copies, mixture.experts.w2])
    torch.testing.assert_close(first + second, expected[0])
    torch.testing.assert_close(experts, expected[1])


def test_balance_losses_of_tensor_parallel_ranks_have_one_gradient_together() -> None:
    balance = torch.tensor(3.0, requires_grad=True)
    losses = [with_balance(torch.tensor(2.0), balance, tp=2) for _ in range(2)]
    assert [float(loss.detach()) for loss in losses] == [5.0, 5.0]
    (gradient,) = torch.autograd.grad(losses, balance)
    assert float(gradient) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": "aot_eager"}, "breaks the graph"),
        ({"mesh": MeshConfig(pp=2), "accumulation": 2}, "no model with experts into stages; set mesh.pp=1"),
        ({"mesh": MeshConfig(ep=3)}, "model.n_experts 8 is not divisible by mesh.ep 3"),
        ({"mesh": MeshConfig(ep=2), "activation_checkpointing": "selective"}, "inside what is recomputed"),
        ({"mesh": MeshConfig(ep=2), "activation_checkpointing": "full", "forward_prefetch": 1}, "that nothing needs"),
        ({"model": replace(CONFIG.model, arithmetic="integer")}, "no whole numbers"),
        ({"model": replace(CONFIG.model, n_experts=0), "mesh": MeshConfig(ep=2)}, "the model has no experts"),
    ],
)
def test_options_that_experts_do_not_go_with_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **changes)


def test_more_experts_for_a_token_than_there_are_are_refused() -> None:
    with pytest.raises(UsageError, match="must be from 1 to n_experts 8"):
        replace(CONFIG.model, experts_per_token=9)


def test_ranks_of_experts_must_divide_those_of_shards() -> None:
    with pytest.raises(UsageError, match=r"dp_shard 3 is not divisible by mesh\.ep 2"):
        resolve_mesh(MeshConfig(dp_shard=3, ep=2), world_size=3)


def test_a_reduction_in_fp16_over_one_shard_is_refused() -> None:
    config = replace(CONFIG, mesh=MeshConfig(dp_shard=2, ep=2), precision="fp16-reduce")
    with pytest.raises(UsageError, match="torch divides fp16 gradients of a group of one shard twice"):
        check_fits_mesh(config, resolve_mesh(config.mesh, world_size=2))


def test_a_divisor_with_a_reduction_in_fp16_over_one_shard_is_refused() -> None:
    dense = replace(CONFIG.model, n_experts=0, experts_per_token=1)
    config = replace(CONFIG, model=dense, mesh=MeshConfig(dp_replicate=2, dp_shard=1), precision="fp16-reduce")
    check_fits_mesh(config, resolve_mesh(config.mesh, world_size=2))
    divided = replace(config, gradient_divisor=4.0)
    with pytest.raises(UsageError, match=r"gradient_divisor 4\.0 and mesh\.dp_shard 1"):
        check_fits_mesh(divided, resolve_mesh(config.mesh, world_size=2))
