"""Emulation of a mesh in one process, compared with plain formulas, and with one process where nothing rounds."""

from functools import partial
from math import floor, log2

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor

from conformance.instruments.operators import with_operands
from conformance.oracles import emulation
from conformance.oracles.emulation import emulated_step
from conformance.oracles.reference import Tensors, initial_model, train_reference
from conformance.plan.cells import Cell
from reference_trainer.config import MeshConfig, ModelConfig, TrainerConfig
from reference_trainer.data import IGNORED_LABEL, Batches

CONFIG = Cell(mesh="dp1").config
BF16 = msgspec.structs.replace(CONFIG, precision="bf16-mp")


def changed(config: TrainerConfig, **changes: object) -> TrainerConfig:
    return msgspec.structs.replace(config, **changes)


def weights(config: TrainerConfig = CONFIG) -> Tensors:
    return {name: p.detach() for name, p in initial_model(config).named_parameters()}


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    return Batches(CONFIG.data, vocab_size=CONFIG.model.vocab_size, seed=CONFIG.seed).global_batch(step)


def deviation(emulated: Tensors, expected: Tensors) -> float:
    assert emulated.keys() == expected.keys()
    return max(float((emulated[name] - value).norm() / value.norm()) for name, value in expected.items())


def test_one_rank_in_bf16_is_a_plain_bf16_step() -> None:
    """A bf16 copy of the model, its buffer in fp32; the gradient in fp32 goes to the fp32 weights."""
    emulated = emulated_step(BF16, weights(), step=0)
    compute = initial_model(CONFIG).bfloat16()
    compute.rope_table = initial_model(CONFIG).rope_table
    inputs, labels = batch()
    logits = compute(inputs)
    assert logits.dtype == torch.bfloat16
    loss_sum = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    valid_tokens = int((labels != IGNORED_LABEL).sum())
    torch.autograd.backward(loss_sum * (1 / valid_tokens))
    assert emulated.loss == pytest.approx(float(loss_sum.detach()) / valid_tokens, rel=1e-6)
    for name, parameter in compute.named_parameters():
        assert parameter.grad is not None
        assert emulated.gradients[name].dtype == torch.float32
        assert torch.equal(emulated.gradients[name], parameter.grad.float()), name


MESHES = [
    MeshConfig(dp_shard=2),
    MeshConfig(dp_replicate=2, dp_shard=2),
    MeshConfig(dp_shard=1, tp=2),
    MeshConfig(dp_shard=2, tp=4),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_mesh_in_fp32_computes_what_one_process_does(mesh: MeshConfig, sequence_parallel: bool, tied: bool) -> None:
    config = changed(CONFIG, mesh=mesh, sequence_parallel=sequence_parallel)
    config = changed(config, model=changed_model(tied_embeddings=tied), loss_parallel=mesh.tp > 1 and tied, steps=1)
    exact = train_reference(config, dtype=torch.float64)
    emulated = emulated_step(config, weights(config), step=0)
    assert emulated.loss == pytest.approx(exact.losses[0], rel=1e-6)
    assert 0.0 < deviation(emulated.gradients, exact.gradients[0]) < 2e-5


def changed_model(**changes: object) -> ModelConfig:
    return msgspec.structs.replace(CONFIG.model, **changes)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_rounds_in_its_own_way_in_bf16(mesh: MeshConfig) -> None:
    exact = train_reference(changed(CONFIG, steps=1), dtype=torch.float64).gradients[0]
    single, meshed = (emulated_step(c, weights(), step=0).gradients for c in (BF16, changed(BF16, mesh=mesh)))
    for name, expected in exact.items():
        assert 2.0**-12 < float((meshed[name] - expected).norm() / expected.norm()) < 2.0**-3, name
        assert not torch.equal(single[name], meshed[name]), name


@pytest.mark.parametrize("gradient_sync", ["each", "last", "all-reduce-last"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mp", "bf16-reduce", "fp16-reduce"])
def test_micro_batches_use_every_sample_once(gradient_sync: str, precision: str) -> None:
    mesh = MeshConfig(dp_replicate=2, dp_shard=2)
    config = changed(CONFIG, mesh=mesh, precision=precision, accumulation=2, gradient_sync=gradient_sync)
    at_once, accumulated = (emulated_step(c, weights(), step=1) for c in (CONFIG, config))
    assert accumulated.loss == pytest.approx(at_once.loss, rel=1e-6 if precision == "fp32" else 1e-2)
    assert deviation(accumulated.gradients, at_once.gradients) < (1e-5 if precision == "fp32" else 2.0**-3)


def test_conditions_tell_how_much_cancels() -> None:
    """Nothing cancels in a single term; the sizes of several terms add up to at least the size of their sum."""
    assert set(emulated_step(CONFIG, weights(), step=0).conditions.values()) == {1.0}
    conditions = emulated_step(changed(CONFIG, mesh=MeshConfig(dp_shard=4)), weights(), step=0).conditions
    assert min(conditions.values()) > 1.0
    assert max(conditions.values()) < 4.0


def test_the_divisor_before_fp16_sums_keeps_them_in_range() -> None:
    """The loss of four ranks is scaled so much that fp16 holds half of their largest sum, but not the sum."""
    exact = emulated_step(CONFIG, weights(), step=0).gradients
    half_of_sum = 2 * max(float(grad.abs().max()) for grad in exact.values())
    scale = 2.0 ** floor(log2(torch.finfo(torch.float16).max / half_of_sum))
    config = changed(CONFIG, mesh=MeshConfig(dp_shard=4), precision="fp16-reduce")
    emulated = emulated_step(config, weights(), step=0, loss_scale=scale).gradients
    assert deviation(emulated, exact) < 2.0**-3


def test_where_gradients_are_added_up_shows_in_bf16() -> None:
    """Gradients that are reduced in bf16 after each micro-batch, or after the last, are rounded differently."""
    base = changed(CONFIG, mesh=MeshConfig(dp_replicate=2, dp_shard=2), precision="bf16-reduce", accumulation=2)
    modes = [changed(base, gradient_sync=mode) for mode in ("each", "last", "all-reduce-last")]
    each, last, all_reduce_last = (emulated_step(c, weights(), step=0).gradients["output.weight"] for c in modes)
    assert not any(map(torch.equal, (each, last, each), (last, all_reduce_last, all_reduce_last)))


def test_gradients_of_several_passes_are_added_up_in_the_dtype_of_computation() -> None:
    """One backward adds them up as it computes them; gradients of two backwards are added up when they are reduced."""
    two = changed(CONFIG, accumulation=2)
    for precision, is_equal in (("fp32", True), ("bf16-mp", False)):
        apart, together = (
            emulated_step(changed(two, precision=precision, passes=passes), weights(), step=0) for passes in (1, 2)
        )
        assert together.loss == apart.loss
        assert deviation(together.gradients, apart.gradients) < 2.0**-6
        equal = [torch.equal(together.gradients[name], apart.gradients[name]) for name in apart.gradients]
        assert all(equal) == is_equal


@pytest.mark.parametrize("precision", ["fp32", "bf16-reduce"])
def test_gradients_that_wait_are_reduced_before_those_of_the_last_passes(precision: str) -> None:
    mesh, emulated = MeshConfig(dp_shard=2), {}
    for sync in ("each", "last"):
        config = changed(CONFIG, mesh=mesh, precision=precision, accumulation=4, passes=2, gradient_sync=sync)
        emulated[sync] = emulated_step(config, weights(), step=0).gradients
    names = [name for name, each in emulated["each"].items() if not torch.equal(each, emulated["last"][name])]
    # Two backwards are two reductions in either mode, but for the embedding, which is left once.
    assert names == ["tok_embeddings.weight"]


@pytest.mark.parametrize("precision", ["bf16-mp", "bf16-reduce"])
def test_gradients_of_copies_are_summed_when_they_are_reduced(precision: str) -> None:
    """After each micro-batch in the dtype of computation, or once, when each rank has added up its own gradients."""
    base = changed(CONFIG, mesh=MeshConfig(dp_shard=1, tp=2), precision=precision, accumulation=2)
    each, last = (
        emulated_step(changed(base, gradient_sync=mode), weights(), step=0).gradients for mode in ("each", "last")
    )
    assert not torch.equal(each["norm.weight"], last["norm.weight"])
    others_are_equal = precision == "bf16-mp"  # reduced in fp32, over one rank, in either mode
    assert torch.equal(each["output.weight"], last["output.weight"]) == others_are_equal


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(CONFIG, model=changed_model(dropout=0.1)), "draws no masks"),
        (changed(CONFIG, mesh=MeshConfig()), "mesh.dp_shard is auto"),
    ],
)
def test_unknown_options_are_refused(config: TrainerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        emulated_step(config, weights(), step=0)


@pytest.mark.parametrize("mesh", [MeshConfig(dp_shard=2), MeshConfig(dp_shard=2, tp=2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mp"])
def test_noting_operands_changes_no_bit(mesh: MeshConfig, precision: str) -> None:
    """Laws compare the emulation whose operands are noted, too."""
    config = changed(CONFIG, mesh=mesh, precision=precision)
    emulate = partial(emulated_step, config, weights(config), step=0)
    plain, (noted, operands) = emulate(), with_operands(emulate)
    assert operands
    assert noted.loss == plain.loss
    assert all(torch.equal(noted.gradients[name], gradient) for name, gradient in plain.gradients.items())


def test_first_gradients_of_a_tied_weight_that_wait_are_cast_one_by_one() -> None:
    config = Cell(precision="bf16-mp", accumulation=2, gradient_sync="last", tied_embeddings=True).config
    dtypes = [emulation._grad_dtype("tok_embeddings.weight", config, place) for place in range(2)]
    assert dtypes == [torch.float32, None]
