"""Sweep of FSDP2's options: none is missing, its sums are exact, and refused or wrong options are narrowed down."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from conformance.sweeps import options as options_module
from conformance.sweeps.covering_sweep import CoveringSweep, Options
from conformance.sweeps.drawing import share_of
from conformance.sweeps.options import (
    DEFAULTS,
    MICRO_BATCHES,
    OPTIONS,
    SmallNet,
    inputs_of,
    option_sweep,
    samples_of,
)
from conformance.sweeps.trials import REFUSAL, End, Ended, Swept

OPTIONS_OF = {
    "module": "groups",
    "mp_policy": "param_dtype",
    "set_gradient_divide_factor": "gradient_divide_factor",
    "set_force_sum_reduction_for_comms": "force_sum_reduction_for_comms",
    "set_requires_gradient_sync": "gradient_sync",
    "set_requires_all_reduce": "gradient_sync",
    "set_reshard_after_forward": "reshard_after_forward",
    "set_reshard_after_backward": "reshard_after_backward",
    "reshard": "reshard_after_backward",
    "set_modules_to_forward_prefetch": "modules_to_prefetch",
    "set_modules_to_backward_prefetch": "modules_to_prefetch",
    "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
    "set_reduce_scatter_max_input_buffers": "reduce_scatter_max_input_buffers",
    "set_separate_reduce_scatter_group": "separate_reduce_scatter_group",
}
"""Options of the sweep by the parameter or method that they try, unless it has their name."""
LEFT_OUT = {
    "dp_mesh_dims": "SPMD meshes, see docs/blind_spots.md",
    "set_all_reduce_hook": "API-2",
    "set_custom_all_gather": "API-2",
    "set_custom_reduce_scatter": "API-2",
    "set_unshard_in_backward": "API-2: valid for modules without parameters in backward alone",
    "reset_iter_state": "API-2: after an error",
    "set_reduce_scatter_divide_factor": "deprecated",
    "set_post_optim_event": "events of devices",
    "set_allocate_memory_from_process_group_for_comm": "memory of NCCL",
    "set_symm_mem_for_comm": "memory of NCCL",
}
"""Parameters and methods without an option, with the reason."""


def test_every_parameter_and_method_is_an_option_or_left_out_for_a_reason() -> None:
    names = set(inspect.signature(fully_shard).parameters) | {field.name for field in fields(MixedPrecisionPolicy)}
    names |= {name for name, value in vars(FSDPModule).items() if callable(value) and not name.startswith("_")}
    assert OPTIONS_OF.keys() | LEFT_OUT.keys() <= names
    assert {OPTIONS_OF.get(name, name) for name in names - LEFT_OUT.keys()} <= OPTIONS.keys()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_has_all_sums_of_sizes_of_gradients(ranks: int, sign: int) -> None:
    sizes: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        for index in range(MICRO_BATCHES):
            net = SmallNet()
            for parameter in net.parameters():
                parameter.data *= sign
            net(inputs_of(samples_of(ranks), index)[rank], with_spare=True).sum().backward()
            for name, parameter in net.named_parameters():
                assert parameter.grad is not None
                sizes[name] = sizes.get(name, torch.zeros(())) + parameter.grad.abs() * max(
                    OPTIONS["forwards_per_step"]
                )
    assert all(float(size.max()) <= 256 for size in sizes.values())


def test_the_gradient_of_an_ignored_parameter_is_told_from_the_mean_over_ranks() -> None:
    grads = []
    for rank in range(4):
        net = SmallNet()
        net(inputs_of(samples_of(4), 0)[rank]).sum().backward()
        grads.append(net.first.bias.grad)
    assert any(not torch.equal(grad, grads[0]) for grad in grads if grad is not None and grads[0] is not None)


def sweep_where(end_of: Callable[[Options], End | None], monkeypatch: pytest.MonkeyPatch, *subjects: str) -> Swept:
    """Return the outcome of a sweep whose trainings end as a function of their options says."""

    def ended(call: Any) -> Ended:
        end = end_of(call.args[1])
        error = RuntimeError("no") if end is End.ERROR else None
        return Ended(end, error, {} if end in (End.RIGHT, End.ERROR) else {"result": "wrong"})

    monkeypatch.setattr(
        options_module, "meshes_of", lambda _: dict.fromkeys(OPTIONS["mesh"], SimpleNamespace(ended=ended))
    )
    return option_sweep(cast("Any", SimpleNamespace())).swept(subjects)


@pytest.mark.usefixtures("mesh")
def test_what_is_wrong_is_narrowed_down_to_the_options_and_defaults_that_make_it_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end_of(options: Options) -> End:
        return (
            End.WRONG
            if options["offload_policy"] and options["forwards_per_step"] == 2 and options["gradient_sync"] != "last"
            else End.RIGHT
        )

    wrong = {each.subject for each in sweep_where(end_of, monkeypatch).wrong}
    assert wrong == {
        f"offload_policy=True, gradient_sync={value}, forwards_per_step=2" for value in ("each", "all-reduce-last")
    }


@pytest.mark.usefixtures("mesh")
def test_all_triples_but_those_that_are_refused_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []

    def end_of(options: Options) -> End:
        if options["frozen"] and options["groups"] == "root alone":
            return End.ERROR
        seen.append(options)
        return End.RIGHT

    swept = sweep_where(end_of, monkeypatch)
    assert swept.refused == {"groups=root alone, frozen=True": 1}
    assert not swept.wrong
    assert any(row["frozen"] and row["load_state_dict"] and row["offload_policy"] for row in seen)
    assert swept.computed["options"] >= 50


@pytest.mark.usefixtures("mesh")
def test_a_sweep_ends_if_not_even_the_defaults_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    swept = sweep_where(lambda _: End.WRONG, monkeypatch)
    assert swept.computed["options"] == 0
    assert "no option" in {each.subject for each in swept.wrong}
    assert DEFAULTS["reshard_after_forward"] is True


@pytest.mark.usefixtures("mesh")
def test_what_no_part_shows_alone_is_reported_as_a_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_of(options: Options) -> End:
        return End.WRONG if sum(options[name] != default for name, default in DEFAULTS.items()) > 20 else End.RIGHT

    swept = sweep_where(end_of, monkeypatch)
    assert all(each.subject.count(",") >= 20 for each in swept.wrong)


@pytest.mark.usefixtures("mesh")
def test_a_restricted_sweep_tries_what_subjects_name_and_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []

    def end_of(options: Options) -> End:
        seen.append(options)
        return End.WRONG if options["offload_policy"] else End.RIGHT

    swept = sweep_where(end_of, monkeypatch, "offload_policy=True, gradient_divide_factor=8.0", "Muon")
    assert seen == [DEFAULTS, {**DEFAULTS, "offload_policy": True, "gradient_divide_factor": 8.0}]
    assert [each.subject for each in swept.wrong] == ["offload_policy=True, gradient_divide_factor=8.0"]
    assert sweep_where(end_of, monkeypatch, "Muon").computed["options"] > 1


def test_a_refusal_that_is_not_known_is_a_fault() -> None:
    def swept(refusals: Sequence[Options] | None) -> Swept:
        def ended(row: Options) -> Ended:
            error = ValueError("refused") if row["first"] == 1 else None
            return Ended(End.ERROR if error else End.RIGHT, error, {})

        options = {"first": (0, 1), "second": (0, 1)}
        sweep = CoveringSweep(options, ended, strength=1, suspects=[{"first": 1}], refusals=refusals)
        return sweep.swept(["first=1"])

    assert swept(None).refused == swept([{"first": 1}]).refused == {"first=1": 1}
    (wrong,) = swept([{"second": 1}]).wrong
    assert (wrong.subject, wrong.fault) == ("first=1", REFUSAL)


@pytest.mark.usefixtures("mesh")
def test_a_share_of_rows_is_tried_without_known_faults() -> None:
    def swept(wrong: int) -> tuple[Swept, list[Options]]:
        tried: list[Options] = []

        def ended(row: Options) -> Ended:
            tried.append(row)
            return Ended(End.WRONG if row["first"] == wrong else End.RIGHT, None, {})

        options = {"first": (0, 1, 2), "second": (0, 1, 2)}
        draw = partial(share_of, kinds=lambda row: map(str, row.items()), share=0.1, seed=0)
        return CoveringSweep(options, ended, strength=2, suspects=[{"first": 1}], draw=draw).swept(), tried

    known, rows = swept(wrong=1)
    assert known.outcomes == {"right": len(rows)}
    assert {row["first"] for row in rows} == {0, 2}
    assert {row["second"] for row in rows} == {0, 1, 2}
    assert len(rows) < 6
    new, _ = swept(wrong=2)
    assert new.outcomes["wrong"] == 1  # although this rank has no fault of it


@pytest.mark.usefixtures("mesh")
def test_defaults_that_are_known_to_fail_are_tried_in_a_share_too() -> None:
    draw = partial(share_of, kinds=lambda _: [0], share=0.1, seed=0)
    sweep = CoveringSweep({"first": (0, 1)}, lambda _: Ended(End.RIGHT, None, {}), suspects=[{}], draw=draw)
    assert sweep.swept().outcomes == {"right": 2}


@pytest.mark.usefixtures("mesh")
def test_a_row_is_narrowed_down_to_known_options_without_more_trials() -> None:
    def swept(known: Sequence[Options]) -> tuple[Swept, int]:
        rows: list[Options] = []

        def ended(row: Options) -> Ended:
            rows.append(row)
            is_refused = row["second"] and row["third"]
            return Ended(End.ERROR if is_refused else End.RIGHT, ValueError("no") if is_refused else None, {})

        options = dict.fromkeys(("first", "second", "third", "fourth"), (False, True))
        return CoveringSweep(options, ended, "call", 2, known=known).swept(), len(rows)

    (slow, most), (fast, fewer) = swept(()), swept([{"first": True}, {"second": True, "third": True}])
    assert fast == slow
    assert fast.refused["call(second=True, third=True)"] == 1
    assert fewer < most
