"""`python -m conformance predict` with experts that ranks divide: parameters, groups, exchanges, refused requests."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conformance.__main__ import main
from conformance.oracles.expert_exchange import exchange_events
from conformance.oracles.traffic import add_up, step_events
from conformance.plan.cells import Cell
from conformance.sizing.activations import KEPT, estimated_profile
from conformance.sizing.prediction import KINDS, Prediction, Request, checkpointing_kinds, configuration, prediction
from reference_trainer.parallel_dims import resolve_mesh
from tests.fast.sizing.test_models import NO_ARGUMENTS, PUBLISHED

SIZES = [*("dim=64", "n_layers=4", "n_heads=8", "n_kv_heads=4", "ffn_dim=96", "vocab_size=512"), "max_seq_len=0"]
EXPERTS = ["experts.number=8", "experts.active=2", "experts.ffn_dim=32"]
EACH = 3 * 64 * 32
"""Parameters of an expert."""
ROWS = 128 * 2 * 64
"""Elements that a rank of 128 tokens sends to experts of a block."""


def small(*overrides: str, mesh: str = "dp4-ep2", **options: Any) -> Prediction:
    defaults: dict[str, Any] = {"model": "llama3-8b", "seq_len": 128, "overrides": [*SIZES, *EXPERTS, *overrides]}
    return prediction(Request(**defaults | options, mesh=mesh))


def sent(predicted: Prediction, phase: str, kind: str, dtype: str) -> list[tuple[str, int, int, int]]:
    rows = (row for row in predicted.traffic if (row.phase, row.kind, row.dtype) == (phase, kind, dtype))
    return [(row.group, row.ranks, row.count, row.input_bytes) for row in rows]


def test_a_block_gathers_the_experts_of_its_rank_alone() -> None:
    """A rank has four of eight experts; each of the two with the same four has a shard of two."""
    whole, divided = small(mesh="dp4"), small()
    assert divided.parameters == whole.parameters
    assert divided.state_bytes == whole.state_bytes
    blocks = [small(f"n_layers={layers}", reshard="never").phases["forward"] for layers in (4, 5)]
    unsharded = [memory.kinds_at_peak["unsharded parameters"] for memory in blocks]
    assert unsharded[1] - unsharded[0] == 2 * (64 * 8 + 4 * EACH + 2 * 64 + 2 * 64 * 64 + 2 * 64 * 32)
    gathers = sent(divided, "forward", "all_gather", "bfloat16")
    assert ("dp_shard/2", 2, 4, 4 * 2 * EACH * 2) in gathers
    for memory in divided.phases.values():
        assert tuple(memory.kinds_at_peak) == KINDS
        assert sum(memory.kinds_at_peak.values()) == memory.peak_bytes


def test_exchanges_of_a_step() -> None:
    """Each block sends rows to experts and back, in forward and in backward, and their numbers once."""
    predicted = small()
    assert sent(predicted, "forward", "all_to_all", "bfloat16") == [("ep", 2, 8, 8 * ROWS * 2)]
    assert sent(predicted, "forward", "all_to_all", "int64") == [("ep", 2, 4, 4 * 8 * 8)]
    assert sent(predicted, "backward", "all_to_all", "bfloat16") == [("ep", 2, 8, 8 * ROWS * 2)]
    assert not sent(predicted, "backward", "all_to_all", "int64")
    (rows,) = (
        row for row in predicted.traffic if row.phase == "forward" and row.dtype == "bfloat16" and row.group == "ep"
    )
    assert rows.sent_bytes == rows.input_bytes // 2
    recomputed = small(activation_checkpointing="full")
    assert sent(recomputed, "backward", "all_to_all", "bfloat16") == [("ep", 2, 16, 16 * ROWS * 2)]
    assert not [row for row in small(mesh="dp4").traffic if row.kind == "all_to_all"]


def test_blocks_without_experts(tmp_path: Path) -> None:
    """Blocks that have no experts exchange nothing, and have one group."""
    file = tmp_path / "dense.yaml"
    sizes = {name: int(size) for name, size in (override.split("=") for override in SIZES)}
    experts = {"number": 8, "active": 2, "ffn_dim": 32, "dense_layers": [0, 2]}
    file.write_text(json.dumps(sizes | {"experts": experts}))
    predicted = prediction(Request(model=str(file), mesh="dp4-ep2", seq_len=128))
    assert sent(predicted, "forward", "all_to_all", "bfloat16") == [("ep", 2, 4, 4 * ROWS * 2)]
    assert ("dp_shard/2", 2, 2, 2 * 2 * EACH * 2) in sent(predicted, "forward", "all_gather", "bfloat16")


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("groups", ["blocks", "blocks-and-ends"])
def test_exchanged_rows_need_memory(checkpointing: str, groups: str) -> None:
    """Rows that were sent and that have arrived, their results, and results that have returned are there at once.

    A rank with all experts has the largest product instead, of twice 64 elements.
    """
    for mesh, mark, copies in (("dp4", "forward layers.3", 1), ("dp4-ep2", "forward layers.3.feed_forward.experts", 4)):
        request = Request(
            model="llama3-8b",
            mesh=mesh,
            overrides=[*SIZES, *EXPERTS],
            activation_checkpointing=checkpointing,
            groups=groups,
        )
        segment = next(each for each in estimated_profile(configuration(request)) if each.mark == mark)
        assert segment.peak_bytes - segment.end_bytes == copies * request.seq_len * 2 * 64 * 2


@pytest.mark.parametrize("mesh", ["hsdp2x4-ep2", "dp2-tp2-ep2", "dp2-tp2"])
def test_the_trainers_experts(mesh: str, tmp_path: Path) -> None:
    """Parameters and collectives are those of the trainer's model with experts, which RS-1, MP-4 and EP-4 judge."""
    cell = Cell(mesh=mesh, model="experts")
    config, model = cell.config, cell.config.model
    dims = resolve_mesh(config.mesh, world_size=cell.world_size)
    sizes = {
        name: getattr(model, name) for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
    }
    experts = {
        "number": model.n_experts,
        "active": model.experts_per_token,
        "ffn_dim": model.ffn_dim,
        "shared_ffn_dim": model.ffn_dim,
    }
    biases = ["wq", "wk", "wv", "wo", "w1", "w2", "w3"] if model.bias else []
    file = tmp_path / "experts.yaml"
    file.write_text(json.dumps(sizes | {"experts": experts, "biases": biases}))
    predicted = prediction(
        Request(
            model=str(file),
            mesh=cell.mesh,
            precision=cell.precision,
            seq_len=config.data.seq_len,
            batch=config.data.global_batch_size // dims.dp,
        )
    )
    expected = add_up([*step_events(config, dims, tp_rank=0), *exchange_events(config, dims)])
    measured = {(row.phase, row.kind, row.dtype, row.input_bytes) for row in predicted.traffic if row.phase != "clip"}
    assert measured == {
        (phase, kind, dtype, traffic.nbytes)
        for (phase, _, kind, dtype), traffic in expected.items()
        if phase != "clip"  # a norm for each of w1 and w3, which are one tensor in a Decoder
    }


def test_parts_of_experts_on_tensor_parallel_ranks() -> None:
    """A rank has half of each of its experts, and copies of the router and of all rows, which it exchanges."""
    whole, parts = small(mesh="dp4-ep2"), small(mesh="dp4-tp2-ep2")
    copied = 4 * (64 * 8 + 2 * 64) + 64  # routers and norms
    assert 2 * parts.state_bytes == whole.state_bytes + 3 * 4 * copied // 4
    assert sent(parts, "forward", "all_to_all", "bfloat16") == sent(whole, "forward", "all_to_all", "bfloat16")
    gradients = [row for row in parts.traffic if (row.phase, row.kind, row.group) == ("backward", "all_reduce", "tp")]
    assert sum(row.input_bytes for row in gradients) == 2 * copied


def test_routers_of_blocks_without_experts_are_not_reduced(tmp_path: Path) -> None:
    file = tmp_path / "dense.yaml"
    sizes = {name: int(size) for name, size in (override.split("=") for override in SIZES)}
    experts = {"number": 8, "active": 2, "ffn_dim": 32, "dense_layers": [0, 2]}
    file.write_text(json.dumps(sizes | {"experts": experts}))
    predicted = prediction(Request(model=str(file), mesh="dp4-tp2-ep2", seq_len=128))
    (norms_and_routers,) = sent(predicted, "backward", "all_reduce", "bfloat16")
    assert norms_and_routers == ("tp", 2, 9 + 2, 2 * (9 * 64 + 2 * 64 * 8))


# Models of Hugging Face

MESHES = {
    "MixtralForCausalLM": (8, 2),
    "Qwen3MoeForCausalLM": (64, 8),
    "GptOssForCausalLM": (16, 4),
    "Llama4ForConditionalGeneration": (16, 4),
    "DeepseekV3ForCausalLM": (128, 32),
}
"""Ranks, and those that divide the experts, by architecture."""
OF_EXPERTS = [each for each in PUBLISHED if each.config["architectures"][0] in MESHES]


@pytest.mark.parametrize("published", OF_EXPERTS, ids=lambda published: published.source.split("/")[4])
def test_state_of_a_rank_is_that_of_the_class_in_transformers(published: Any, tmp_path: Path) -> None:
    """Stacks of experts are divided among ranks, and then sharded over those with the same ones; the rest over all."""
    ranks, ep = MESHES[published.config["architectures"][0]]
    settings = published.config.get("text_config", published.config)
    settings = {name: value for name, value in settings.items() if name not in NO_ARGUMENTS}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[settings["model_type"]](**settings))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published.config))
    predicted = prediction(Request(model=str(file), mesh=f"dp{ranks}-ep{ep}"))
    parts = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert predicted.state_bytes == 3 * 4 * sum(shards(parts, ranks=ranks, ep=ep))
    assert predicted.parameters == sum(math.prod(shape) for _, shape in parts)


def shards(parts: Iterable[tuple[str, Sequence[int]]], *, ranks: int, ep: int) -> Iterable[int]:
    """Yield the elements of a rank's shard of each parameter, with padding."""
    for name, (rows, *rest) in parts:
        divided = ep if ".experts." in name else 1
        yield math.ceil(rows // divided / (ranks // divided)) * math.prod(rest)


@pytest.mark.parametrize("published", OF_EXPERTS, ids=lambda published: published.source.split("/")[4])
def test_exchanged_bytes_of_published_models(published: Any, tmp_path: Path) -> None:
    """In bf16, forward sends each token to its experts and back, in each block that has some."""
    ranks, ep = MESHES[published.config["architectures"][0]]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published.config))
    predicted = prediction(Request(model=str(file), mesh=f"dp{ranks}-ep{ep}", seq_len=4096))
    settings = published.config.get("text_config", published.config)
    blocks, step = settings["num_hidden_layers"], settings.get("interleave_moe_layer_step", 1)
    sparse = blocks // step - settings.get("first_k_dense_replace", 0)
    row_bytes = 2 * settings["num_experts_per_tok"] * settings["hidden_size"]
    assert sent(predicted, "forward", "all_to_all", "bfloat16") == [
        ("ep", ep, 2 * sparse, 2 * sparse * 4096 * row_bytes)
    ]


# Refused requests


def test_kinds_of_checkpointing_that_the_trainer_runs() -> None:
    assert checkpointing_kinds(Request(model="llama3-8b", mesh="dp4-ep2")) == ("none", "full")
    assert set(checkpointing_kinds(Request(model="llama3-8b", mesh="dp4"))) < set(KEPT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "dp4-ep3"}, "ep3 does not divide 4 ranks"),
        ({"mesh": "dp16-ep16"}, "model.n_experts 8 is not divisible by mesh.ep 16"),
        ({"mesh": "dp4-ep2", "activation_checkpointing": "selective"}, "which torch 2.13 refuses"),
        ({"mesh": "pp2-dp4-ep2", "accumulation": 2}, "experts"),
        ({"mesh": "dp8-ep2", "reshard": "2"}, "experts have other shards than the rest"),
        ({"mesh": "dp8-cp2"}, "the trainer refuses mesh.cp with model.n_experts"),
    ],
)
def test_refused_requests(options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in ({"model": "llama3-8b"} | options).items()]
    assert main(["predict", *given, *(f"--set={override}" for override in [*SIZES, *EXPERTS])]) == 4
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experts.ffn_dim=33"], "model.ffn_dim 33 is not divisible by mesh.tp 2"),
        (["experts.shared_ffn_dim=31"], "model.ffn_dim 31 is not divisible by mesh.tp 2"),
    ],
)
def test_experts_that_tensor_parallelism_cannot_cut(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(*overrides, mesh="dp4-tp2-ep2")


def test_biases_of_experts_have_no_part_for_each_rank(tmp_path: Path) -> None:
    sizes = {name: int(size) for name, size in (override.split("=") for override in SIZES)}
    file = tmp_path / "biased.yaml"
    file.write_text(json.dumps(sizes | {"experts": {"number": 8, "active": 2, "ffn_dim": 32}, "biases": ["experts"]}))
    with pytest.raises(ValueError, match="tensor parallelism of biases of experts is not modelled"):
        prediction(Request(model=str(file), mesh="dp4-tp2-ep2"))


def test_a_model_without_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--model=llama3-8b", "--mesh=dp4-ep2"]) == 4
    assert "the model has no experts that ep could divide; use a mesh without ep" in capsys.readouterr().err


def test_rows_of_experts_cannot_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"--set={override}" for override in [*SIZES, *EXPERTS]]
    assert main(["predict", "--model=llama3-8b", "--mesh=dp4-ep2", *given, "--simulate"]) == 4
    assert "data alone tells how many rows an expert gets" in capsys.readouterr().err
