"""`python -m conformance predict`: known sizes, a published number, room on devices, and refused requests."""

import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.__main__ import main
from conformance.sizing.activations import LOGITS
from conformance.sizing.device import DeviceFit, device_fit
from conformance.sizing.fixed_costs import parse_bytes
from conformance.sizing.models import MODELS
from conformance.sizing.prediction import KINDS, Prediction, Request, prediction
from conformance.sizing.published import Published, read_published
from conformance.sizing.rendering import prediction_text

_GIB = 1024**3
FOUR_STAGES: dict[str, Any] = {"mesh": "pp4-dp2", "accumulation": 8, "overrides": ["vocab_size=256"]}


def predict(model: str = "llama3-8b", mesh: str = "dp8", **options: Any) -> Prediction:
    return prediction(Request(model=model, mesh=mesh, **options))


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama2-7b", 6.74),
        ("llama3-8b", 8.03),
        ("codellama-34b", 33.74),
        ("llama3-70b", 70.55),
        ("llama3.1-405b", 405.85),
    ],
)
def test_published_numbers_of_parameters(model: str, billions: float) -> None:
    predicted = predict(model, "dp1024")
    assert round(predicted.parameters / 1e9, 2) == billions
    assert 12 * predicted.parameters / 1024 <= predicted.state_bytes < 12.2 * predicted.parameters / 1024


def test_never_above_always_as_published() -> None:
    """The difference of two modes is that of published peaks: 62.18 GiB and 49.41 GiB.

    Published for Llama-3-8B on 8 GPUs with sequences of 8192; embedding, norm and output are in the root, which is
    never resharded, and neither is the last block.
    """
    kept = json.dumps({"tok_embeddings": "never", r"layers\.31": "never", "output": "never"})
    never, always = (predict(reshard=mode).phases["backward"].peak_bytes for mode in ("never", kept))
    assert (never - always) / _GIB == pytest.approx(62.18 - 49.41, rel=0.03)


def test_the_largest_model_on_4096_ranks() -> None:
    predicted = predict("llama3.1-405b", "hsdp8x64-tp8", activation_checkpointing="full")
    assert predicted.ranks == 4096
    assert predicted.phases["backward"].peak_bytes < 80 * _GIB
    sent = {(t.kind, t.group) for t in predicted.traffic}
    assert {("all_gather", "dp_shard"), ("reduce_scatter", "dp_shard"), ("all_reduce", "dp_replicate")} <= sent


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"reshard": "always"}, {"reshard": "never"}),
        ({"mesh": "dp16"}, {"mesh": "dp8"}),
        ({"mesh": "dp8-tp2"}, {"mesh": "dp8"}),
        ({"offload": "cpu"}, {}),
        ({"activation_checkpointing": "full"}, {}),
        ({"seq_len": 4096}, {}),
        ({}, {"precision": "fp32"}),
        ({}, {"batch": 2}),
    ],
)
def test_what_needs_less(less: dict[str, Any], more: dict[str, Any]) -> None:
    peaks = [max(use.peak_bytes for use in predict(**options).phases.values()) for options in (less, more)]
    assert peaks[0] < peaks[1]


def test_state_that_is_offloaded_is_not_on_the_device() -> None:
    predicted = predict(offload="cpu")
    assert predicted.phases["backward"].end_bytes == predicted.buffer_bytes
    assert predicted.phases["optimizer"].peak_bytes == predicted.buffer_bytes
    assert predicted.phases["forward"].kinds_at_peak["unsharded parameters"] > 0


def test_collectives_in_the_order_of_time() -> None:
    predicted = predict("llama3-70b", "hsdp2x4-tp2", precision="fp16-mp")
    phases = list(dict.fromkeys(row.phase for row in predicted.traffic))
    assert phases == ["data", "forward", "backward", "unscale", "clip", "idle"]
    assert list(predicted.phases) == ["forward", "backward", "clip", "optimizer", "idle"]


def test_the_schedules_of_a_pipeline() -> None:
    """GPipe holds the activations of all micro-batches, 1F1B those of as many as there are stages to the last."""
    gpipe, one_f_one_b = predict(pipeline="gpipe", **FOUR_STAGES), predict(**FOUR_STAGES)
    assert (gpipe.ranks, one_f_one_b.stage) == (8, 0)
    assert gpipe.activation_bytes > 2 * one_f_one_b.activation_bytes
    assert max(gpipe.stage_peaks_bytes) < 1.02 * min(gpipe.stage_peaks_bytes)
    assert one_f_one_b.stage_peaks_bytes == sorted(one_f_one_b.stage_peaks_bytes, reverse=True)
    for memory in [*one_f_one_b.phases.values(), *predict(reshard="never", accumulation=2).phases.values()]:
        assert tuple(memory.kinds_at_peak) == KINDS
        assert sum(memory.kinds_at_peak.values()) == memory.peak_bytes


def test_ranks_with_two_stages() -> None:
    """Interleaved 1F1B fills its pipeline with more micro-batches than 1F1B, and gathers before its first forward.

    The first of four ranks begins with 4 forwards of its first stage and 2 * 3 + 1 more, of layers half as many as
    those of 1F1B's stage: (11 / 2) / 4 of its activations, less what the ends of the model have.
    """
    looped, one_f_one_b = predict(pipeline="interleaved-1f1b", **FOUR_STAGES), predict(**FOUR_STAGES)
    assert looped.activation_bytes / one_f_one_b.activation_bytes == pytest.approx(11 / 8, rel=0.01)
    gathers = {row.phase: row.count for row in looped.traffic if row.kind == "all_gather" and row.group == "dp_shard"}
    assert gathers == {"data": 9}
    assert list(looped.phases) == ["data", "forward", "backward", "clip", "optimizer", "idle"]
    sent = {row.phase: row.count for row in looped.traffic if row.kind == "send"}
    assert sent == {"forward": 16, "backward": 8}


@pytest.mark.parametrize(("schedule", "received", "held"), [("1f1b", 1, 0), ("interleaved-1f1b", 3, 3)])
def test_what_ranks_with_two_stages_send_is_held(schedule: str, received: int, held: int) -> None:
    """A rank with two stages holds all that it has sent in a step: more, if the step has 16 micro-batches more.

    The first of four ranks receives and sends an output of each stage, and a gradient, of 8192 tokens by 4096 in bf16.
    """
    options = FOUR_STAGES | {"pipeline": schedule}
    more, fewer = (predict(**options | {"accumulation": count}).stage_peaks_bytes[0] for count in (32, 16))
    tokens = 2 * 8192 * 8
    assert more - fewer == 16 * (tokens + (received + held) * 8192 * 4096 * 2)


@pytest.mark.parametrize(("schedule", "rank", "held"), [("interleaved-zero-bubble", 2, 6), ("zbv-zero-bubble", 3, 5)])
def test_backwards_in_two_halves(schedule: str, rank: int, held: int) -> None:
    """Between the halves activations stay, and gradients come on top; the modes are those that the trainer runs.

    The third of four ranks needs most, with a V the last. Each has four buffers for each of 8 micro-batches of 8192
    tokens by 4096, and holds until the next step two of the gradients that it has sent, at the bend of a V one.
    """
    halved, whole = (predict(pipeline=each, **FOUR_STAGES) for each in (schedule, "interleaved-1f1b"))
    assert halved.stage == rank
    assert halved.stage_peaks_bytes[3] > 1.5 * whole.stage_peaks_bytes[3]
    assert [mode.reshard for mode in halved.modes] == ["never", "default"]
    for memory in halved.phases.values():
        assert sum(memory.kinds_at_peak.values()) == memory.peak_bytes
        assert min(memory.kinds_at_peak.values()) >= 0
    assert halved.phases["idle"].kinds_at_peak["communication buffers"] == held * 8 * 8192 * 4096 * 2


def test_what_reshard_modes_cost_under_a_pipeline() -> None:
    """`default` gathers each group once, `always` for each forward and each backward that finds the group freed.

    The first of four stages runs four forwards, then a backward and a forward in turn: 8 + 1 gathers of each group.
    """
    predicted = predict(mesh="pp4-dp2", accumulation=4)
    modes = {mode.reshard: mode for mode in predicted.modes}
    assert list(modes) == ["never", "except-last", "default", "always"]
    assert modes["default"] == msgspec.structs.replace(modes["never"], reshard="default")
    assert modes["default"].peak_bytes > modes["always"].peak_bytes
    assert (modes["default"].all_gathers, modes["always"].all_gathers) == (9, 9 * 5)
    assert 5 * modes["default"].gathered_bytes == modes["always"].gathered_bytes
    assert not predict().modes
    request = Request(model="llama3-8b", mesh="pp4-dp2", accumulation=4)
    text = prediction_text(request, predicted)
    assert "Peaks of the ranks of the pipeline: " in text
    assert "Reshard modes, each on the rank that needs most, in one step:" in text


def test_what_a_stage_sends() -> None:
    """The first stage sends the bf16 activations of each micro-batch, 8192 tokens by 4096."""
    (sent,) = [row for row in predict(mesh="pp2-dp4", accumulation=4).traffic if row.kind == "send"]
    assert (sent.phase, sent.group, sent.count) == ("forward", "pp", 4)
    assert sent.sent_bytes == 4 * 8192 * 4096 * 2


def test_what_a_rank_of_eight_sends() -> None:
    """All-gathers send the bf16 parameters of seven other ranks, reduce-scatters seven eighths of fp32 gradients."""
    predicted = predict()
    sent = {(row.phase, row.kind): row for row in predicted.traffic}
    gathered, reduced = sent["forward", "all_gather"], sent["backward", "reduce_scatter"]
    assert (gathered.ranks, gathered.input_bytes) == (8, 2 * predicted.parameters // 8)
    assert gathered.sent_bytes == 7 * gathered.input_bytes
    assert reduced.input_bytes == 4 * predicted.parameters
    assert reduced.sent_bytes == reduced.input_bytes * 7 // 8
    assert f"{gathered.sent_bytes / _GIB:.1f} and {reduced.sent_bytes / _GIB:.1f}" == "13.1 and 26.2"


def test_text() -> None:
    request = Request(model="llama3-8b", mesh="dp8")
    assert set(lines(prediction_text(request, prediction(request)))) >= {
        "llama3-8b, 8.03 billion parameters: dp8 (8 ranks), bf16-mp,",
        "reshard default, activation checkpointing none, logits kept, offload none, 1 x 8192 tokens",
        "sharded parameters 3.74 3.74 3.74 3.74 3.74",
        "gradients 0.00 0.00 3.74 3.74 0.00",
        "temporaries 9.91 7.83 0.00 0.52 0.00",
        "peak 67.12 70.06 14.96 15.48 11.22",
        "held afterwards 62.23 14.96 14.96 11.22 11.22",
        "State on the device: 11.22 GiB. Activations that are kept for backward, an estimate: 50.03 GiB.",
        "forward all_gather dp_shard 8 bfloat16 34 1.870 13.088",
        "backward all_gather dp_shard 8 bfloat16 33 1.747 12.232",
        "backward reduce_scatter dp_shard 8 float32 34 29.915 26.176",
        "after zero_grad all_reduce dp_shard 8 float32 1 0.000 0.000",
    }


def lines(text: str) -> list[str]:
    """Return the lines of a text, with one space between words."""
    return [" ".join(line.split()) for line in text.splitlines()]


# Models with another structure than the trainer's


SIZES = [*("dim=64", "n_layers=4", "n_heads=8", "n_kv_heads=4", "ffn_dim=96", "vocab_size=512"), "max_seq_len=0"]
EXPERTS = ["experts.number=8", "experts.active=2", "experts.ffn_dim=32"]


def small(*overrides: str, mesh: str = "dp4", **options: Any) -> Prediction:
    return predict(mesh=mesh, overrides=[*SIZES, *overrides], **{"seq_len": 128} | options)


def test_heads_of_any_size() -> None:
    """Queries, keys, values and the output of attention are half as wide, and so are their four products."""
    whole, half = small(mesh="dp2-tp2"), small("head_dim=4", mesh="dp2-tp2")
    assert whole.parameters - half.parameters == 4 * 64 * (32 + 16 + 16 + 32)
    assert whole.activation_bytes - half.activation_bytes == 4 * 128 * (4 * 32) * 2 // 2
    assert [row.input_bytes for row in whole.traffic if row.group == "tp"] == [
        row.input_bytes for row in half.traffic if row.group == "tp"
    ]


def test_norms_of_heads_are_replicated_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Each of the four blocks reduces the gradients of two more norms, each as wide as a head."""
    file = tmp_path / "qwen.yaml"
    file.write_text((MODELS / "llama3-8b.yaml").read_text() + "norms: [q_norm, k_norm]\n")
    plain, normed = (small(model=model, mesh="dp2-tp2") for model in ("llama3-8b", str(file)))
    (before,), (after,) = (
        [row for row in each.traffic if (row.phase, row.group, row.kind) == ("backward", "tp", "all_reduce")]
        for each in (plain, normed)
    )
    assert after.count - before.count == 4 * 2
    assert after.input_bytes - before.input_bytes == 4 * 2 * 8 * 2
    assert normed.activation_bytes - plain.activation_bytes == 4 * 128 * (64 + 32) * 2 // 2


def test_experts_are_sharded_by_fsdp_alone() -> None:
    """A block gathers all experts; a token has activations of two, and of the router."""
    plain, experts = small(), small(*EXPERTS)
    router, each = 64 * 8, 3 * 64 * 32
    assert experts.parameters - plain.parameters == 4 * (router + 8 * each - 3 * 64 * 96)
    assert experts.parameters - experts.active_parameters == 4 * 6 * each
    assert experts.activation_bytes - plain.activation_bytes == 4 * 128 * 2 * (2 * (2 * 64 + 4 * 32) - 4 * 96)
    blocks = [small(f"n_layers={layers}", *EXPERTS, reshard="never").phases["forward"] for layers in (4, 5)]
    unsharded = [memory.kinds_at_peak["unsharded parameters"] for memory in blocks]
    assert unsharded[1] - unsharded[0] == 2 * (router + 8 * each + 2 * 64 + 2 * 64 * 64 + 2 * 64 * 32)
    assert experts.notes == [
        "Experts are sharded by FSDP alone, without expert parallelism, and a block gathers all of its experts; tokens "
        "are spread evenly over them."
    ]


def test_more_ranks_than_experts() -> None:
    """Each of 16 ranks has buffers for one of 8 stacked experts, half of which is padding."""
    few, many = small(*EXPERTS, mesh="dp8"), small(*EXPERTS, mesh="dp16")
    assert any("8 over 16 ranks leave 8 ranks without any, and pad buffers to 16" in note for note in many.notes)
    assert len(few.notes) == 1
    experts_bytes = 3 * 4 * (4 * (3 * 64 * 32 + 64))  # and a row of the router
    assert many.state_bytes - experts_bytes == (few.state_bytes - experts_bytes) // 2


LATENTS = [f"latents.{name}={size}" for name, size in [("kv_rank", 16), ("nope_dim", 8), ("rope_dim", 4), ("v_dim", 6)]]


def test_latent_attention() -> None:
    """Queries of 8 x 12, a latent of 16 with a rotated part of 4, keys and values of 8 x (8 + 6), and the output."""
    plain, latent = small(), small(*LATENTS)
    products = 64 * 8 * 12 + 64 * (16 + 4) + 16 * 8 * (8 + 6) + 64 * 8 * 6
    assert latent.parameters - plain.parameters == 4 * (products + 16 - 2 * 64 * 64 - 2 * 64 * 32)
    widths = 8 * (12 + 12 + 6 + 6) + 2 * 16
    assert latent.activation_bytes - plain.activation_bytes == 4 * 128 * 2 * (widths - 4 * 64)


# Kept activations


def test_torchtitans_checkpointing_keeps_what_it_has_published() -> None:
    """The difference of two published peaks of Llama 2 7B, in which all else is equal, is 49.54 GiB less 22.73."""
    options: dict[str, Any] = {"seq_len": 2048, "batch": 8, "reshard": "except-last", "groups": "blocks"}
    op, full = (predict("llama2-7b", activation_checkpointing=kind, **options) for kind in ("selective-op", "full"))
    peaks = [max(memory.peak_bytes for memory in each.phases.values()) for each in (op, full)]
    assert (peaks[0] - peaks[1]) / _GIB == pytest.approx(49.54 - 22.73, abs=0.01)


@pytest.mark.parametrize("run", [run for run in read_published() if run.counted == "active"], ids=lambda run: run.run)
def test_published_active_memory(run: Published) -> None:
    """Nothing of a prediction was fitted to these figures."""
    peaks = [memory.peak_bytes for memory in prediction(run.request).phases.values()]
    assert max(peaks) / _GIB == pytest.approx(run.published_gib, rel=0.03)


def test_reserved_memory_bounds_what_is_predicted_without_a_compiler() -> None:
    for run in read_published():
        peak_gib = max(memory.peak_bytes for memory in prediction(run.request).phases.values()) / _GIB
        assert run.counted == "active" or (peak_gib < run.published_gib) == ("compile" not in run.why)


def test_logits_that_are_held() -> None:
    """128 tokens and 512 words: 4 bytes each in fp32, 2 in bf16."""
    held = {logits: small(logits=logits).activation_bytes for logits in LOGITS}
    logits_bytes = 4 * 128 * 512
    assert held["kept"] - held["freed"] == logits_bytes // 2
    assert held["kept-fp32"] - held["freed"] == logits_bytes
    assert held["freed"] - held["chunked"] == logits_bytes  # the logarithms
    with pytest.raises(ValueError, match="logits some: choose from kept, kept-fp32, freed, chunked"):
        small(logits="some")


def test_logits_that_stay_sharded() -> None:
    whole, sharded = (small(mesh="dp2-tp2", logits="freed", loss_parallel=parallel) for parallel in (False, True))
    assert whole.activation_bytes - sharded.activation_bytes == 4 * 128 * 512 // 2
    alone = [small(loss_parallel=parallel).phases for parallel in (False, True)]
    assert alone[0] == alone[1]


def test_what_tensor_parallelism_does_not_shard() -> None:
    """Inputs of products are gathered for each rank, which keeps those of attention, feed-forward and output."""
    one, two = (small(mesh=mesh, logits="chunked").activation_bytes for mesh in ("dp2", "dp2-tp2"))
    gathered_bytes = (2 * 4 + 1) * 64 * 128 * 2
    assert two - gathered_bytes == (one - gathered_bytes) // 2


# Devices


def test_ranges_of_fixed_costs() -> None:
    """Each group of ranks has a communicator, and at most the default group as well."""
    one, two = ({cost.name.split(",")[0]: cost for cost in small(mesh=mesh).fixed_costs} for mesh in ("dp4", "dp4-tp2"))
    assert list(one) == ["CUDA context", "NCCL", "cuBLAS workspaces", "AdamW"]
    assert all(cost.source and cost.least_bytes <= cost.most_bytes for cost in one.values())
    assert two["NCCL"].least_bytes == 2 * one["NCCL"].least_bytes
    assert two["NCCL"].most_bytes == one["NCCL"].most_bytes * 3 // 2
    state = small().phases["idle"].kinds_at_peak["sharded parameters"] - small().buffer_bytes
    assert one["AdamW"].most_bytes == state
    assert one["AdamW"].most_in("backward") == small(offload="cpu").fixed_costs[-1].most_bytes == 0


def test_own_fixed_costs() -> None:
    (cost,) = small(fixed_costs="1.5GiB").fixed_costs
    assert cost.least_bytes == cost.most_bytes == cost.most_in("backward") == 3 * 2**29
    assert small(fixed_costs="0GiB").fixed_costs[0].most_bytes == 0
    with pytest.raises(ValueError, match="fixed costs 2: write a number and a unit"):
        small(fixed_costs="2")


FOUR_LAYERS = Request(model="llama3-8b", mesh="dp8", overrides=("n_layers=4",), fixed_costs="1GiB")


def fit_of(size: str) -> DeviceFit:
    return device_fit(FOUR_LAYERS, prediction(FOUR_LAYERS), device_bytes=parse_bytes(size))


def test_sizes() -> None:
    assert [parse_bytes(size) for size in ("80GiB", "80GB", "1.5 GiB")] == [80 * 2**30, 80 * 10**9, 3 * 2**29]
    assert [parse_bytes(size) for size in ("512MiB", "1MB")] == [2**29, 10**6]
    for size in ("", "80", "GiB", "80G", "80gib", "-1GiB", "0GiB", "1e3GiB", "80 GiB or so", "nanGiB"):
        message = f"device memory {size}: write a number above 0 and a unit, one of MiB, GiB, MB, GB: 80GiB"
        with pytest.raises(ValueError, match=re.escape(message)):
            parse_bytes(size)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (
            "25GiB",
            [
                "Fits into 25.00 GiB of device memory: 1.00 GiB left at the peak, in backward, with up to 1.00 GiB of "
                "fixed costs."
            ],
        ),
        (
            "22GiB",
            [
                "Does not fit into 22.00 GiB of device memory: 2.00 GiB too much in backward, with up to 1.00 GiB of "
                "fixed costs.",
                "These would fit, the least recomputation first:",
                "--reshard --activation-checkpointing peak (GiB) left (GiB)",
                "----------- ---------------------------- ------------ ------------",
                "default selective 20.62 0.38",
                "always selective 19.64 1.36",
                "never full 20.35 0.65",
                "except-last full 18.15 2.85",
                "default full 17.74 3.26",
                "always full 16.76 4.24",
            ],
        ),
        (
            "1GiB",
            [
                "Does not fit into 1.00 GiB of device memory: 23.00 GiB too much in backward, with up to 1.00 GiB of "
                "fixed costs.",
                "Nor does any --reshard (never, except-last, default, always) together with any",
                "--activation-checkpointing (none, selective, full): the least is 16.76 GiB, with --reshard always",
                "--activation-checkpointing full. Try more ranks, or fewer or shorter samples, or --offload cpu.",
            ],
        ),
    ],
)
def test_verdict_on_a_device(size: str, expected: list[str]) -> None:
    text = prediction_text(FOUR_LAYERS, prediction(FOUR_LAYERS), fit_of(size))
    (paragraph,) = [each for each in text.split("\n\n") if "of device memory" in each]
    assert lines(paragraph) == expected


def test_other_settings_have_the_peaks_of_their_predictions() -> None:
    fit = fit_of("12GiB")
    assert (fit.fits, len(fit.tried)) == (False, 11)
    for setting in fit.tried:
        asked_for = msgspec.structs.replace(
            FOUR_LAYERS, reshard=setting.reshard, activation_checkpointing=setting.activation_checkpointing
        )
        peak_bytes = max(memory.peak_bytes for memory in prediction(asked_for).phases.values())
        assert setting.peak_bytes == peak_bytes == 11 * 2**30 - setting.left_bytes


def test_a_device_of_just_the_peak_and_fixed_costs() -> None:
    predicted = prediction(FOUR_LAYERS)
    needed_bytes = 2**30 + max(memory.peak_bytes for memory in predicted.phases.values())
    assert device_fit(FOUR_LAYERS, predicted, device_bytes=needed_bytes).fits
    assert device_fit(FOUR_LAYERS, predicted, device_bytes=needed_bytes - 1).left_bytes == -1


def test_exit_status_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["predict", "--model=llama3-8b", "--mesh=dp8", "--set=n_layers=4", "--json", "--device-memory"]
    assert main([*arguments, "80GiB"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert set(predicted) == {*Prediction.__struct_fields__, "device"}
    assert predicted["phases"]["forward"]["peak_bytes"] > predicted["state_bytes"] > 0
    assert predicted["device"]["tried"] == []
    assert main([*arguments, "12GiB"]) == 1
    device = json.loads(capsys.readouterr().out)["device"]
    assert (device["left_bytes"] < 0, device["phase"]) == (True, "backward")


def chart(file: Path, *options: str) -> ET.Element:
    main(["predict", "--model=llama2-7b", "--mesh=dp8", "--set=n_layers=4", f"--picture={file}", *options])
    return ET.parse(file).getroot()


def elements(svg: ET.Element, name: str) -> list[ET.Element]:
    return [element for element in svg.iter() if element.get("class") == name]


def right_end(bar: ET.Element) -> float:
    return float(bar.attrib["x"]) + float(bar.attrib["width"])


def test_the_chart_is_stacked_by_kind_of_memory_and_has_a_legend(tmp_path: Path) -> None:
    svg, predicted = chart(tmp_path / "p.svg"), predict("llama2-7b", overrides=["n_layers=4"])
    bars = elements(svg, "memory")
    assert len(bars) == sum(nbytes > 0 for m in predicted.phases.values() for nbytes in m.kinds_at_peak.values())
    assert {bar.attrib["fill"] for bar in bars} == {entry.attrib["fill"] for entry in elements(svg, "legend")}
    text = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert {*KINDS, "forward", "after zero_grad"} <= set(text)
    rows = {bar.attrib["y"]: [other for other in bars if other.get("y") == bar.get("y")] for bar in bars}
    for row, memory in zip(rows.values(), predicted.phases.values(), strict=True):
        gaps = [abs(right_end(left) - float(right.attrib["x"])) for left, right in pairwise(row)]
        assert max(gaps) < 0.2
        largest = max(m.peak_bytes for m in predicted.phases.values())
        assert right_end(row[-1]) - 110 == pytest.approx(580 * memory.peak_bytes / largest, abs=0.2)


@pytest.mark.parametrize(("size", "beyond"), [("2GiB", True), ("500GiB", False)])
def test_the_chart_has_a_line_for_the_device(size: str, beyond: bool, tmp_path: Path) -> None:
    svg = chart(tmp_path / "p.svg", f"--device-memory={size}")
    (line,) = [element for element in svg.iter() if element.tag.endswith("line")]
    ends = [right_end(bar) for bar in elements(svg, "memory")]
    assert (max(ends) > float(line.attrib["x1"])) == beyond
    assert not [element for element in chart(tmp_path / "p.svg").iter() if element.tag.endswith("line")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "dp8-tp3"}, "model.n_heads 32 is not divisible by mesh.tp 3"),
        ({"reshard": "3"}, "reshard to 3 ranks: must be a divisor of mesh.dp_shard, 8"),
        ({"reshard": '{"block.*": "never"}'}, "block.* matches none of the groups"),
        ({"precision": "bf16-mixed"}, "precision bf16-mixed: choose from fp32, bf16-mp"),
        ({"mesh": "pp4-dp2", "accumulation": 4, "set": "tied_embeddings=true"}, "on different stages"),
        ({"mesh": "pp4-dp2", "accumulation": 4, "groups": "blocks"}, "leave grouping out"),
        ({"groups": "ends"}, "groups ends: choose from blocks-and-ends, blocks"),
        ({"set": "dropout=0.1"}, "--set dropout=0.1: unknown field `dropout`"),
        (
            {"set": "sinks=true", "mesh": "dp4-tp2"},
            "tensor parallelism of sinks is not modelled; use a mesh without tp",
        ),
        (
            {"mesh": "dp4-tp2", "activation_checkpointing": "selective-op"},
            "selective-op with tp: torchtitan's policy then counts other operators",
        ),
        ({"fixed_costs": "-1GiB"}, "fixed costs -1GiB: write a number and a unit"),
        ({"mesh": "pp4-dp2", "accumulation": 2}, "set accumulation=4 or more"),
        ({"mesh": "pp2-dp4", "accumulation": 2, "pipeline": "dualpipev"}, "choose from 1f1b, gpipe"),
        ({"mesh": "pp2-dp4", "accumulation": 2, "pipeline": "zbv-zero-bubble", "reshard": "always"}, "reshard never"),
        ({"mesh": "pp2-dp4", "accumulation": 2, "reshard": "2"}, "in a pipeline choose from never, except-last"),
    ],
)
def test_refused_requests(options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    merged = {"model": "llama3-8b", "mesh": "dp8"} | options
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in merged.items()]
    assert main(["predict", *arguments]) == 4
    assert message in capsys.readouterr().err
