"""Memory model on cases small enough to be computed manually, and bounds too wide to prove anything."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from conformance.assertions.fixtures import Measure
from conformance.assertions.memory_bounds import sizes_of
from conformance.experiments import without_fsdp
from conformance.experiments.memory import StepMemory
from conformance.instruments.activations import GroupMarks
from conformance.instruments.memory import memory_ledger
from conformance.laws.memory import test_mem as laws
from conformance.memory_segment import MemorySegment
from conformance.oracles import pipeline
from conformance.oracles.memory_model import group_bytes, predict, resident_bytes, state_bytes
from conformance.oracles.schedule import entered, groups, shardings
from conformance.oracles.torch_versions import FROM_2_15, UP_TO_2_14, VersionTraits, gradients_stay
from conformance.plan.cells import Cell
from conformance.run.experiment import Experiment, job_of
from conformance.run.ranks.messages import RankContext
from reference_trainer.config import TrainerConfig

GROUPS = ("tok_embeddings", "layers.0", "layers.1", "output")
MODES = ("always", "default", "except-last", "never")


def empty_profile(groups: tuple[str, ...] = GROUPS) -> list[MemorySegment]:
    """Return the profile of a model without activations and gradients."""
    marks = ["forward", *(f"{when} {group}" for group in groups for when in ("forward", "after-forward")), "backward"]
    for group in reversed(groups[1:]):
        marks += [f"{when} {group}" for when in ("backward", "after-backward", "freed")]
    marks += ["backward tok_embeddings", "after-backward tok_embeddings", "freed tok_embeddings", "end"]
    return [MemorySegment(mark, 0, 0, 0) for mark in marks]


def test_the_state_is_that_of_padded_shards() -> None:
    config, dims, shapes = sizes_of(Cell(mesh="dp4", model="even"))
    numel = sum(group_bytes(config, dims, shapes).values()) // 4
    assert state_bytes(config, dims, shapes) == numel // 4 * 4 * 3
    uneven = sizes_of(Cell(mesh="dp4"))
    assert state_bytes(*uneven) > 3 * sum(torch.Size(shape).numel() for shape in uneven[2].values())


def test_a_step_without_activations() -> None:
    """Forward with `always` holds the largest group three times, two of them for the last copy; all are freed."""
    config, dims, shapes = sizes_of(Cell(mesh="dp4", reshard="always"))
    sizes = group_bytes(config, dims, shapes)
    block = sizes["layers.1"]
    phases = predict(config, dims, shapes, empty_profile())
    assert phases["forward"].peak_bytes == 3 * block
    assert phases["forward"].end_bytes == phases["idle"].end_bytes == 0
    # U and A of the first block, and the input of the reduction of the second; gradients of what was reduced before.
    assert phases["backward"].peak_bytes == 3 * block + (sizes["output"] + block) // 4
    assert phases["backward"].end_bytes == sum(sizes.values()) // 4
    later = predict(config, dims, shapes, empty_profile(), traits=VersionTraits(previous_gather_until_copied=False))
    assert later["forward"].peak_bytes == 2 * block
    alone = sizes_of(Cell(mesh="dp1", reshard="always"))
    assert predict(*alone, empty_profile())["forward"].peak_bytes == max(group_bytes(*alone).values())


@pytest.mark.parametrize(
    ("optimizer", "temporaries"),
    [("adamw", 9), ("adamw-foreach", 7), ("adamw-fused", 0), ("sgd", 4), ("sgd-momentum", 4)],
)
def test_temporaries_of_the_optimizer(optimizer: Any, temporaries: int) -> None:
    """Count rows: three matrices of 2, 1 and 4 rows of 8 elements in fp32, and a vector, which is small."""
    config, dims, _ = sizes_of(Cell(mesh="dp1", optimizer=optimizer))
    shapes: dict[str, tuple[int, ...]] = {"layers.0.attention.wk.bias": (1,)}
    shapes |= {f"layers.0.attention.{name}.weight": (rows, 8) for name, rows in {"wq": 2, "wk": 1, "wv": 4}.items()}
    phases = predict(config, dims, shapes, [])
    assert phases["optimizer"].peak_bytes == temporaries * 8 * 4
    assert state_bytes(config, dims, shapes) == (57 * 4) * (1 + config.optimizer.moments)


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_kinds_of_memory_add_up_to_the_peak(offload: Literal["none", "cpu"]) -> None:
    config, dims, shapes = sizes_of(Cell(mesh="dp4", precision="bf16-mp", reshard="always", offload=offload))
    block = group_bytes(config, dims, shapes)["layers.1"]
    phases = predict(config, dims, shapes, empty_profile(), device_only=True)
    assert all(sum(usage.kinds_at_peak.values()) == usage.peak_bytes for usage in phases.values())
    kinds = phases["backward"].kinds_at_peak
    assert (kinds["unsharded parameters"], kinds["communication buffers"]) == (block, 3 * block)
    assert (kinds["gradients"] > 0) == (offload == "none")


def test_offloaded_gradients_and_the_optimizer_are_not_on_the_device() -> None:
    """On the CPU they count, since its memory is the host's."""
    config, dims, shapes = sizes_of(Cell(mesh="dp4", reshard="always", offload="cpu"))
    host, device = (predict(config, dims, shapes, empty_profile(), device_only=only) for only in (False, True))
    gradients = sum(group_bytes(config, dims, shapes).values()) // 4
    assert (host["backward"].end_bytes, device["backward"].end_bytes) == (gradients, 0)
    assert host["optimizer"].peak_bytes > gradients
    assert device["optimizer"].peak_bytes == 0


def test_the_last_rank_has_less_of_the_optimizer() -> None:
    """Three ranks do not divide the rows: all hold gradients of one size, and moments without padding."""
    config, dims, shapes = sizes_of(Cell(mesh="dp3", model="large", optimizer="adamw-foreach"))
    first, last = (predict(config, dims, shapes, empty_profile(), shard_rank=rank) for rank in (0, 2))
    assert first["clip"] == last["clip"]
    less = {name: (3 * -(-rows // 3) - rows) * torch.Size(rest).numel() for name, (rows, *rest) in shapes.items()}
    matrices = sum(numel for name, numel in less.items() if len(shapes[name]) > 1)
    assert first["optimizer"].peak_bytes - last["optimizer"].peak_bytes == 4 * matrices > 0
    held = [resident_bytes(config, dims, shapes, shard_rank=rank) for rank in (0, 2)]
    assert held[0] - held[1] == 2 * 4 * sum(less.values())


def with_gradients(narrow: Mapping[str, int], wide: Mapping[str, int]) -> list[MemorySegment]:
    """Return a profile with gradients: bytes by group, in the parameters' dtype (`narrow`) and in a wider one."""
    profile = []
    for segment in empty_profile():
        group = segment.mark.removeprefix("freed ")
        if group != segment.mark:
            for kind, sizes in (("gradients", narrow), ("wide-gradients", wide)):
                nbytes = sizes.get(group, 0)
                profile.append(MemorySegment(f"{kind} {group}", nbytes, nbytes, 0))
        profile.append(segment)
    return profile


def test_gradients_that_must_be_cast_are_copied_once_more() -> None:
    """The peak with `never` is where the input of the last block's reduction is filled; shards are negligible here."""
    config, dims, shapes = sizes_of(Cell(mesh="dp64", model="wide", precision="bf16-mp", reshard="never"))
    sizes = {group: nbytes for group, nbytes in group_bytes(config, dims, shapes).items() if group in GROUPS}
    block, matrix, norms = sizes["layers.1"], 2 * config.model.dim**2, 2 * 2 * config.model.dim
    reduced = 2 * sizes["output"] // 64
    filled = sizes["tok_embeddings"] + sizes["layers.0"] + block + 2 * block + reduced  # U of two groups, B, I, G
    one_dtype = predict(config, dims, shapes, with_gradients(sizes, {}))
    assert one_dtype["backward"].peak_bytes == filled + matrix
    with_norms = with_gradients({**sizes, "layers.1": block - norms}, {"layers.1": 2 * norms})
    two_dtypes = predict(config, dims, shapes, with_norms)
    assert two_dtypes["backward"].peak_bytes == filled + norms + 2 * (block - norms)


def test_gradients_that_wait_are_held_in_the_reduce_dtype() -> None:
    cell = Cell(mesh="dp4", model="even", precision="bf16-mp", reshard="always", accumulation=2, gradient_sync="last")
    config, dims, shapes = sizes_of(cell)
    sizes = group_bytes(config, dims, shapes)
    phases = predict(config, dims, shapes, with_gradients(sizes, {}) * 2)
    assert phases["forward"].peak_bytes == 3 * sizes["layers.1"] + 2 * sum(sizes.values())
    assert phases["backward"].end_bytes == 2 * sum(sizes.values()) // 4


def test_where_gradients_wait() -> None:
    fp32, bf16 = Cell().config, Cell(precision="bf16-mp").config
    assert gradients_stay(fp32, UP_TO_2_14)
    assert not gradients_stay(bf16, UP_TO_2_14)
    assert gradients_stay(bf16, FROM_2_15)


def released(cell: Cell, traits: VersionTraits, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return bytes of the last block's gradients, narrow and wide, that a run without FSDP releases by micro-batch."""
    monkeypatch.setattr(without_fsdp, "traits_of", lambda _version: traits)
    profile = without_fsdp.profile_without_fsdp
    segments = profile.perform(RankContext(0, 1, "", 1.0), job_of(cell, Path(), defect=None))
    sizes = [s.start_bytes - s.end_bytes for s in segments if s.mark.endswith("gradients layers.1")]
    return list(zip(sizes[::2], sizes[1::2], strict=True))


def test_gradients_of_a_run_without_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are in bf16 up to torch 2.13; from 2.15 on those of norms, which compute in fp32, are not cast."""
    cell = Cell(mesh="dp2", precision="bf16-mp")
    config, _dims, shapes = sizes_of(cell)
    numel = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith("layers.1."))
    norms = 2 * config.model.dim
    assert released(cell, UP_TO_2_14, monkeypatch) == [(2 * numel, 0)]
    assert released(cell, FROM_2_15, monkeypatch) == [(2 * (numel - norms), 4 * norms)]
    waiting = cell.but(accumulation=2, gradient_sync="last")
    assert released(waiting, UP_TO_2_14, monkeypatch) == [(2 * numel, 0)] * 2
    assert released(waiting, FROM_2_15, monkeypatch) == [(0, 0), (0, 4 * numel)]


def test_gradients_that_are_not_released_stay() -> None:
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    marks = GroupMarks({str(index): [layer] for index, layer in enumerate(layers)})

    def step() -> list[str]:
        with memory_ledger() as ledger:
            layers[1](layers[0](torch.ones(1, 8))).sum().backward()
            marks.finish_backward()
        return [segment.mark for segment in ledger.segments if segment.mark.startswith("freed")]

    marks.releases = False
    assert step() == step() == ["freed 1", "freed 0"]
    assert all(isinstance(layer.weight.grad, Tensor) for layer in layers)
    marks.releases = True
    assert step() == ["freed 1", "freed 0"]
    assert all(layer.weight.grad is None for layer in layers)


@pytest.mark.parametrize("depth", [1, 2])
def test_prefetched_groups(depth: int) -> None:
    """2 + k blocks are held: in forward U and A of a block, and A of the k blocks that are prefetched."""
    cell = Cell(mesh="dp4", reshard="always", model="deep").but(forward_prefetch=depth, backward_prefetch=depth)
    config, dims, shapes = sizes_of(cell)
    sizes = group_bytes(config, dims, shapes)
    block = sizes["layers.1"]
    marks = empty_profile(tuple(sizes))
    for traits in (VersionTraits(), VersionTraits(previous_gather_until_copied=False)):
        phases = predict(config, dims, shapes, marks, traits=traits)
        assert phases["forward"].peak_bytes == (2 + depth) * block
        assert phases["forward"].end_bytes == phases["idle"].end_bytes == 0
        # When the last block that has k - 1 to prefetch copies its own out: U, k times A, and the input of the
        # reduction of the block before it in backward; gradients of all groups before.
        reduced = sizes["output"] + (config.model.n_layers - depth) * block
        assert phases["backward"].peak_bytes == (2 + depth) * block + reduced // dims.dp_shard


@pytest.mark.parametrize("mesh", ["dp4", "hsdp2x2", "dp2-tp2", "dp64"])
def test_groups_kept_after_forward_add_up(mesh: str) -> None:
    rests = []
    for mode in MODES:
        config, dims, shapes = sizes_of(Cell(mesh=mesh, reshard=mode))  # type: ignore[arg-type]
        rests.append(predict(config, dims, shapes, empty_profile())["forward"].end_bytes)
        sizes = group_bytes(config, dims, shapes)
    assert rests == [0, sizes["output"], sizes["output"] + sizes["layers.1"], sum(sizes.values())]


def stages_profile(config: TrainerConfig, *, rank: int) -> list[MemorySegment]:
    """Return the marks of a rank of the pipeline whose stages have no activations."""
    marks: list[str] = []
    actions = pipeline.order(config, rank=rank)
    last = {action.stage: index for index, action in enumerate(actions)}
    for index, (kind, stage, _) in enumerate(actions):
        names = pipeline.groups_of(stage, config)
        marks += [f"stage {stage}", kind]
        if kind == "forward":
            marks += [f"{mark} {name}" for name in names for mark in ("forward", "after-forward")]
            continue
        marks += [f"{mark} {name}" for name in reversed(names) for mark in ("backward", "gradients", "freed")]
        marks.append("end")
        if last[stage] == index:
            marks += ["reduce", *(f"{mark} {name}" for name in names for mark in ("gradients", "freed")), "end"]
    return [MemorySegment(mark, 0, 0, 0) for mark in marks]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize("rank", [0, 1])
def test_stages_without_activations(schedule: Any, rank: int) -> None:
    """`default` holds stages unsharded until gradients are reduced; `always` frees each group after its forward.

    A rank with two stages holds the outputs of all their gathers before its first action.
    """
    cell = Cell(mesh="pp2-dp2", model="cut", accumulation=4, pipeline=schedule)
    config, dims, shapes = sizes_of(cell, stage=rank)
    sizes = group_bytes(config, dims, shapes)
    tokens = 2 * config.data.global_batch_size // dims.dp * config.data.seq_len * 8
    default = predict(config, dims, shapes, stages_profile(config, rank=rank))
    if not pipeline.has_one_stage(config):
        assert default["data"].end_bytes == sum(sizes.values()) + tokens
    assert default["forward"].end_bytes == sum(sizes.values()) + tokens
    assert default["backward"].end_bytes == sum(sizes.values()) // dims.dp_shard
    always = predict(cell.but(reshard="always").config, dims, shapes, stages_profile(config, rank=rank))
    if schedule != "interleaved-1f1b":  # before its last forward is a backward of the other stage, which frees nothing
        assert always["forward"].end_bytes == tokens
    if pipeline.has_one_stage(config):
        assert always["forward"].peak_bytes < default["forward"].peak_bytes


def measured(change: Mapping[str, tuple[int, int]], *, kernels: bool = True) -> Measure:
    """Return the fixture `measure`: predictions without activations, plus changes by phase in bytes.

    Without `kernels` they are for a device with kernels for FSDP2's copies.
    """

    def measure(experiment: Experiment[Any], cell: Cell, *, on_device: bool = False) -> list[Any]:
        if experiment is without_fsdp.profile_without_fsdp:
            assert on_device != kernels, "activations must be those of the device"
            return [empty_profile()]
        config, dims, shapes = sizes_of(cell)
        memories = []
        for rank in range(1 if experiment.processes == "sampled" else cell.world_size):
            shard_rank, segments = dims.shard_rank(rank), []
            predicted = predict(config, dims, shapes, empty_profile(), shard_rank=shard_rank, kernels=kernels)
            for phase, usage in predicted.items():
                peak, rest = change.get(phase, (0, 0))
                segments.append(MemorySegment(phase, 0, usage.peak_bytes + peak, usage.end_bytes + rest, 1, 1, 1))
            held_bytes = resident_bytes(config, dims, shapes, shard_rank=shard_rank)
            memories.append(StepMemory(segments, [], held_before_bytes=held_bytes, device_level_bytes=1))
        return memories

    return measure


CELL = Cell(mesh="dp4", model="deep", reshard="never").but(model="tiny")


def test_bounds_that_prove_nothing_are_the_suites_error() -> None:
    with pytest.raises(ValueError, match=r"bounds of \w+ are more than a factor of 1.16 apart"):
        laws.test_memory_on_every_rank_matches_the_model(measured({}), CELL)


def test_experts_on_a_mesh_of_their_own_have_fewer_shards() -> None:
    """Each of two ranks has four of eight experts, which two ranks shard; the rest of a block is sharded over four."""
    config, dims, shapes = sizes_of(Cell(mesh="dp4-ep2", model="experts", reshard="never"))
    experts = [name for name in shapes if name.startswith("layers.0.") and ".experts." in name]
    numel = sum(torch.Size(shapes[name]).numel() for name in experts)
    assert group_bytes(config, dims, shapes)["layers.0.feed_forward.experts"] == 4 * numel // 2
    parts = shardings(shapes, config, shards=dims.dp_shard)
    assert sum(parts[name].shard for name in experts) == numel // 4
    assert {parts[name].ranks for name in experts} == {2}
    assert parts["layers.0.feed_forward.router.weight"].ranks == 4
    usage = predict(config, dims, shapes, empty_profile(tuple(entered(groups(config)))))["forward"]
    assert usage.end_by_buffer["U"] == sum(group_bytes(config, dims, shapes).values())


def test_shards_of_unequally_many_experts() -> None:
    """Three experts over two ranks with the same ones: these are the ranks 0 and 2, and 1 and 3, of four."""
    config = Cell(mesh="dp4-ep2", model="experts").config
    (part,) = shardings({"layers.0.feed_forward.experts.w1": (6, 5, 2)}, config, shards=4).values()
    assert (part.rows, part.shard, part.padded) == (3, 2 * 10, 4 * 10)
    assert [part.own(rank) for rank in range(4)] == [20, 20, 10, 10]


def test_recomputed_experts_stay_for_backward() -> None:
    """A recomputed forward frees the output of its all-gather, and not the experts, which backward needs next."""
    config, dims, shapes = sizes_of(
        Cell(mesh="dp4-ep2", model="experts", reshard="always", activation_checkpointing="full")
    )
    name = "layers.0.feed_forward.experts"
    marks = ["forward", f"forward {name}", f"after-forward {name}", "backward", f"forward {name}"]
    profile = [MemorySegment(mark, 0, 0, 0) for mark in [*marks, f"after-forward {name}"]]
    group = group_bytes(config, dims, shapes)[name]
    phases = predict(config, dims, shapes, profile)
    assert phases["forward"].end_by_buffer == {"A": group}  # until the next group of forward
    assert phases["backward"].end_by_buffer == {"U": group}


def test_norms_of_experts_are_taken_after_those_of_the_rest() -> None:
    """The peak of clipping has scalars of one mesh: two, and in a p-norm two and one for each dimension of it."""
    for norm, each in (("2", 2 + 2 + 1), ("inf", 2)):
        config, dims, shapes = sizes_of(Cell(mesh="dp4-ep2", model="experts").but(norm_type=norm))
        rest = sum(".experts." not in name for name in shapes)
        clip = predict(config, dims, shapes, empty_profile())["clip"]
        assert clip.peak_bytes - clip.end_bytes == 4 * rest * each
