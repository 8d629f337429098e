"""Models and their initial weights: the Llama, the integer model, and precisions."""

import math
from math import frexp
from typing import get_args

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from conformance.oracles.reference import initial_model, summed_loss, train_reference
from conformance.plan.cells import Cell
from reference_trainer.config import ModelConfig, TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches
from reference_trainer.init_weights import init_weights, normal, signs
from reference_trainer.integer_model import EXACT_BELOW, largest_partial_sum, linear_attention
from reference_trainer.loss import summed_cross_entropy
from reference_trainer.loss import summed_loss as trainers_summed_loss
from reference_trainer.mixed_precision import mixed_precision_policy
from reference_trainer.model import Transformer, apply_rope, rope_table
from reference_trainer.precision import PRECISIONS, Dtype, PrecisionName

SMALL = ModelConfig(
    vocab_size=13, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24, max_seq_len=8, bias=True,
    init_std=0.3, bias_std=0.1, norm_std=0.2,
)  # fmt: skip


def model_of(config: ModelConfig, *, seed: int = 0) -> Transformer:
    model = Transformer(config)
    init_weights(model, seed=seed)
    return model.double()


# --- model -----------------------------------------------------------------------------------------------------------


def test_rope_rounds_bf16_once() -> None:
    x = normal((2, 8, 4, 4), name="x", seed=0).bfloat16()
    assert torch.equal(apply_rope(x, rope_table(SMALL)), apply_rope(x.float(), rope_table(SMALL)).bfloat16())


def test_tied_embeddings_are_one_parameter() -> None:
    model = Transformer(msgspec.structs.replace(SMALL, tied_embeddings=True))
    assert model.output.weight is model.tok_embeddings.weight
    assert "output.weight" not in dict(model.named_parameters())
    assert Transformer(SMALL).output.weight is not Transformer(SMALL).tok_embeddings.weight


def test_rope_table_is_no_part_of_the_state() -> None:
    model = Transformer(SMALL)
    assert "rope_table" in dict(model.named_buffers())
    assert "rope_table" not in model.state_dict()


def test_loss_counts_valid_labels_only() -> None:
    logits = normal((2, 3, 5), name="logits", seed=0)
    labels = torch.tensor([[0, 4, IGNORED_LABEL], [IGNORED_LABEL, 2, 1]])
    chosen = [logits.log_softmax(-1)[b, t, labels[b, t]] for b, t in ((0, 0), (0, 1), (1, 1), (1, 2))]
    torch.testing.assert_close(summed_cross_entropy(logits, labels), -torch.stack(chosen).sum())


# --- initial weights -------------------------------------------------------------------------------------------------


def test_initial_weights_depend_on_seed_and_name() -> None:
    first, same, other = (dict(model_of(SMALL, seed=seed).named_parameters()) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    fingerprints = {(tuple(p.shape), float(p.detach().sum())) for p in first.values()}
    assert len(fingerprints) == len(first)


def test_initial_weights_do_not_depend_on_the_other_layers() -> None:
    shallow, deep = (dict(model_of(msgspec.structs.replace(SMALL, n_layers=n)).named_parameters()) for n in (1, 3))
    assert all(torch.equal(shallow[name], deep[name]) for name in shallow)


def test_initial_weights_have_the_specified_statistics() -> None:
    config = msgspec.structs.replace(SMALL, dim=64, ffn_dim=96)
    model = Transformer(config)
    init_weights(model, seed=0)
    for name, p in model.named_parameters():
        is_norm = name.endswith("norm.weight")
        mean, std = (1.0, config.norm_std) if is_norm else (0.0, config.bias_std if p.ndim == 1 else config.init_std)
        # Five standard errors of the sample mean and of the sample standard deviation: about one miss in 10^6.
        assert abs(float(p.detach().mean()) - mean) < 5 * std / math.sqrt(p.numel()), name
        assert abs(float(p.detach().std()) - std) < 5 * std / math.sqrt(2 * p.numel()), name


def test_initialisation_fills_parameters_and_buffers_of_a_meta_model() -> None:
    with torch.device("meta"):
        model = Transformer(msgspec.structs.replace(SMALL, tied_embeddings=True))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(math.nan)
    init_weights(model, seed=0)
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model.rope_table, rope_table(SMALL))


def test_a_module_without_a_rule_is_refused() -> None:
    model = Transformer(SMALL)
    model.layers["2"] = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match=r"no initialisation rule for layers\.2\.weight of BatchNorm1d: add one to"):
        init_weights(model, seed=0)


# Integer model


CELL = Cell(model="integer", optimizer="sgd", clip=0.0, steps=1)
CONFIG = CELL.config


def first_batch(config: TrainerConfig) -> tuple[Tensor, Tensor]:
    return Batches(config.data, vocab_size=config.model.vocab_size, seed=config.seed).global_batch(0)


def is_power_of_two(value: float) -> bool:
    return frexp(value)[0] == 0.5


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("seed", [0, 1, 405])  # of the first 600 seeds, 405 has the largest sums
def test_every_sum_of_the_workload_is_exact(seed: int, tied: bool) -> None:
    """In units of lr / tokens the new weight, too, is a sum of integers: the old weight, and the gradient."""
    config = CELL.but(seed=seed, tied_embeddings=tied).config
    largest = largest_partial_sum(initial_model(config), *first_batch(config))
    tokens, lr = config.data.global_batch_size * config.data.seq_len, config.optimizer.lr
    assert is_power_of_two(tokens)
    assert is_power_of_two(lr)
    assert config.data.min_valid_fraction == 1.0
    assert config.optimizer.weight_decay == config.optimizer.momentum == 0.0
    assert largest + tokens / lr < EXACT_BELOW


def test_the_bound_holds_and_is_reached_where_nothing_cancels() -> None:
    model, (inputs, labels) = initial_model(CONFIG).double(), first_batch(CONFIG)
    bound = largest_partial_sum(model, inputs, labels)
    assert largest_entry(model, (inputs, labels)) < bound
    for parameter in model.parameters():
        parameter.data.abs_()
    assert largest_entry(model, (inputs, labels)) == bound == largest_partial_sum(model, inputs, labels)


def largest_entry(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Return the largest absolute value of loss, logits and gradients."""
    logits = model(batch[0])
    loss = -logits.gather(-1, batch[1].unsqueeze(-1)).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return max(float(tensor.detach().abs().max()) for tensor in (loss, logits, *gradients))


def test_the_bound_sees_weights_that_are_too_large() -> None:
    model = initial_model(CONFIG)
    assert largest_partial_sum(model, *first_batch(CONFIG)) < EXACT_BELOW
    with torch.no_grad():
        model.get_parameter("layers.0.attention.wv.weight").mul_(16)
    assert largest_partial_sum(model, *first_batch(CONFIG)) > EXACT_BELOW


def test_fp32_equals_fp64_in_every_bit() -> None:
    fp32, fp64 = (train_reference(CONFIG, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert fp32.losses == fp64.losses
    for name, expected in fp64.gradients[0].items():
        assert torch.equal(fp32.gradients[0][name].double(), expected), name
        assert torch.equal(fp32.parameters[name].double(), fp64.parameters[name]), name
    float_model = CELL.but(model="tiny").config
    rounded, exact = (train_reference(float_model, dtype=dtype) for dtype in (torch.float32, torch.float64))
    equal = [torch.equal(rounded.gradients[0][name].double(), grad) for name, grad in exact.gradients[0].items()]
    assert not any(equal), "the usual model must not pass for an exact one"


# --- what it computes ------------------------------------------------------------------------------------------------


def test_attention_adds_query_key_and_earlier_values() -> None:
    batch, seq, heads, kv_heads, head_dim = 2, 5, 4, 2, 3
    q, k, v = (
        signs((batch, seq, n, head_dim), name=name, seed=0, nonzeros_per_row=2)
        for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    out = linear_attention(q, k, v, torch.empty(0))
    assert out.shape == q.shape
    for head in range(heads):
        shared = head // (heads // kv_heads)
        for t in range(seq):
            expected = q[:, t, head] + k[:, t, shared] + v[:, : t + 1, shared].sum(1)
            assert torch.equal(out[:, t, head], expected)


@pytest.mark.parametrize("name", [name for name, _ in initial_model(CONFIG).named_parameters()])
def test_loss_is_linear_in_each_parameter(name: str) -> None:
    """The slope along any direction is exact, so gradients are right, and a parameter without effect would show."""
    model, batch = initial_model(CONFIG).double(), first_batch(CONFIG)
    parameter = model.get_parameter(name)
    direction = signs(tuple(parameter.shape), name=name, seed=1, nonzeros_per_row=3).double()
    loss = summed_loss(model, batch)
    (gradient,) = torch.autograd.grad(loss, parameter)
    with torch.no_grad():
        parameter.add_(direction)
    assert float(summed_loss(model, batch).detach() - loss.detach()) == float((gradient * direction).sum())
    assert gradient.count_nonzero() >= gradient.numel() / 2


def test_initial_weights_are_sparse_signs() -> None:
    for name, parameter in initial_model(CONFIG).named_parameters():
        values, width = parameter.detach(), parameter.shape[-1]
        nonzeros = width if name.endswith("norm.weight") else width // 8 if parameter.ndim == 1 else 2
        assert (values.count_nonzero(-1) == nonzeros).all(), name
        assert set(values.flatten().tolist()) <= {-1.0, 0.0, 1.0}, name
        assert parameter.ndim == 1 or {-1.0, 1.0} <= set(values.flatten().tolist()), name


def test_the_loss_goes_with_the_arithmetic() -> None:
    logits = signs((2, 3, 5), name="logits", seed=0, nonzeros_per_row=5)
    labels = torch.tensor([[0, 4, -100], [-100, 2, 1]])
    chosen = sum(logits[b, t, labels[b, t]] for b, t in ((0, 0), (0, 1), (1, 1), (1, 2)))
    assert trainers_summed_loss(logits, labels, arithmetic="integer") == -chosen
    cross_entropy = summed_cross_entropy(logits, labels)
    assert trainers_summed_loss(logits, labels, arithmetic="float") == cross_entropy != -chosen
    with pytest.raises(ValueError, match="loss_parallel computes a cross entropy"):
        TrainerConfig(model=ModelConfig(arithmetic="integer"), loss_parallel=True)


# Precisions


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def test_every_name_is_in_the_table() -> None:
    assert tuple(PRECISIONS) == get_args(PrecisionName)


@pytest.mark.parametrize("name", get_args(Dtype))
def test_dtypes_are_those_of_torch(name: str) -> None:
    assert str(getattr(torch, name)) == f"torch.{name}"


@pytest.mark.parametrize(
    ("precision", "compute", "reduce"),
    [
        ("fp32", None, None),
        ("bf16-mp", BF16, FP32),
        ("bf16-init", BF16, FP32),
        ("bf16-reduce", BF16, BF16),
        ("bf16-params", BF16, None),
        ("bf16-mixed", BF16, FP32),
        ("fp16-mp", FP16, FP32),
        ("fp16-reduce", FP16, FP16),
    ],
)
def test_what_fully_shard_is_told(
    precision: PrecisionName, compute: torch.dtype | None, reduce: torch.dtype | None
) -> None:
    """`cast_forward_inputs` has its default, True, only with the default policy, which casts nothing."""
    expected = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=compute is None)
    assert mixed_precision_policy(precision) == expected


def test_a_loss_is_scaled_where_computation_is_in_fp16() -> None:
    assert [name for name, precision in PRECISIONS.items() if precision.scales_loss] == ["fp16-mp", "fp16-reduce"]
