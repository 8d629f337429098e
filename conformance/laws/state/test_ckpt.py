"""CKPT: a run that was saved, stopped and resumed is the run that never stopped."""

from collections.abc import Sequence

from msgspec.structs import replace

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure, Run
from conformance.assertions.steps import compare_steps, is_emulated, run_before_save, without_checkpoint
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.experiments.state_dicts import take_state_dict_before_training, use_state_dicts
from conformance.instruments.facts import OptimizerGroup
from conformance.judge.law import law
from conformance.judge.measurements import measure as report
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.run.record import Record
from conformance.sweeps import (
    checkpoint_failures,
    checkpoint_formats,
    checkpoint_layouts,
    checkpoint_options,
    checkpoint_storage,
)

CHECKPOINT = "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html"
STATE_DICT = f"{CHECKPOINT}#torch.distributed.checkpoint.state_dict.StateDictOptions"
ASYNC_SAVE = f"{CHECKPOINT}#torch.distributed.checkpoint.state_dict_saver.async_save"


@law("CKPT-1", where="saved_on = same and saving = blocking", gaps=["large-models"], numbers=True, reference=CHECKPOINT)
def test_checkpoint_resumes_bit_for_bit(run: Run, measure: Measure, cell: Cell) -> None:
    """A run that is saved, stopped and resumed in new processes on the same mesh MUST equal the uninterrupted run in
    every bit, and each step, before and after, MUST be that of one process.

    Wrong if moments, step counters, the schedule, random numbers or the data position are lost or off by one.
    """
    _require_continuation(run, measure, cell)


@law("CKPT-2", where="saved_on not in (none, same)", gaps=["large-models"], numbers=True, reference=CHECKPOINT)
def test_checkpoint_is_resumed_on_another_mesh(run: Run, measure: Measure, cell: Cell) -> None:
    """A checkpoint loaded on any mesh MUST restore parameters and optimizer state in every bit, and the steps that
    follow MUST be those of one process from this state.

    Wrong if shards are put together in another order than they were cut: a round trip on one mesh would not show it.
    """
    record, saved = run(cell), run(run_before_save(cell))
    kinds = saved.kinds("final")
    begun = [] if saved.steps_taken else state_of_no_step(record, kinds, when="resumed")
    if record.kinds("resumed") != sorted([*kinds, *begun]):
        raise ConformanceFailure(f"loaded {record.kinds('resumed')}, saved {kinds}")
    for kind in kinds:
        compare.bits(record.select(f"resumed/{kind}/"), saved.select(f"final/{kind}/"), name=f"resumed {kind}")
    if is_emulated(measure, record):
        compare_steps(record)


@law("CKPT-3", where="saved_on = same and saving = async", gaps=["large-models"], numbers=True, reference=ASYNC_SAVE)
def test_async_checkpoint_does_not_see_later_steps(run: Run, measure: Measure, cell: Cell) -> None:
    """A checkpoint saved while training goes on MUST be the state at the call, in every bit, and each step, before and
    after, MUST be that of one process.

    Nothing is written before the next step has changed every parameter. Wrong if the save keeps the run's own tensors.
    """
    _require_continuation(run, measure, cell)


@law(
    "CKPT-4",
    where="world > 1 and world <= 8 and implementation = fsdp2 and (features = 1 and model = even "
    "or tp = 1 and (features = 0 or precision = bf16-mixed and offload = cpu and optimizer != sgd and saved_on = none "
    "and tied_embeddings = false))",
    gaps=["experts-unnamed", "pipelines"],
    own_run=True,
    reference=STATE_DICT,
)
def test_state_dicts_restore_the_run_in_every_form(measure: Measure, cell: Cell) -> None:
    """A state dict that is sharded, full, offloaded, flattened or broadcast from rank 0 MUST restore parameters,
    optimizer state and each group's options in every bit, and the next step MUST be the same.

    A full state dict has the gathered tensors; if offloaded, on rank 0 alone. With `strict=False` missing and
    unexpected keys are reported, and all others are loaded, also from a full state dict. With tensor parallelism torch
    2.13 loads a full state dict of dimensions that are divisible by all ranks only
    (findings/full_state_dict_of_uneven_strided_shards.py).
    """
    ranks = measure(use_state_dicts, cell)
    for form in ranks[0]:
        wrong = {f"rank {rank}: {what}": n for rank, uses in enumerate(ranks) for what, n in uses[form].items() if n}
        compare.count(sum(wrong.values()), name=form, expected=0, detail=str(wrong), unit="wrong values")


@law(
    "CKPT-5",
    where="world > 1 and world <= 4 and tp = 1 and implementation = fsdp2 "
    "and (features = 0 or features = 1 and optimizer in (sgd, sgd-momentum))",
    own_run=True,
    reference=STATE_DICT,
    since="2.8",
)
def test_get_state_dict_before_the_first_step_changes_nothing(measure: Measure, cell: Cell) -> None:
    """A state dict that is taken before the first step MUST NOT change a bit of that step.

    Wrong if the step that initialises the optimizer's state is counted, or leaves a trace in it.
    """
    ranks = measure(take_state_dict_before_training, cell)
    wrong = {kind: sum(rank.get(kind, 0) for rank in ranks) for rank in ranks for kind in rank}
    for kind, values in sorted(wrong.items()):
        report(f"{kind} that differ", values, kind="exact", lower=0, upper=0, unit="values of all ranks")
    compare.count(sum(wrong.values()), name="values that differ", expected=0, detail=str(wrong), unit="values")


@law(
    "CKPT-6",
    where="id in (dp2-fp32-default-meta-integer, dp4-fp32-default-meta)",
    reference=CHECKPOINT,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_a_checkpoint_of_any_layout_is_loaded_in_any_other(measure: Measure, cell: Cell) -> None:
    """A checkpoint of tensors that are sharded along any dimensions of any mesh MUST be loaded, in every bit, on more,
    fewer or other ranks, in any other layout and as plain tensors.

    Also if some ranks hold nothing, for uneven shards and those without elements, and a second time into the same
    tensors.
    """
    require_no_wrong_result(measure(checkpoint_layouts.sweep, cell), unit="loads")


@law(
    "CKPT-7",
    where="id in (dp2-fp32-default-meta, dp4-fp32-default-meta)",
    reference=CHECKPOINT,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_options_of_saving_and_loading_do_not_disturb_each_other(measure: Measure, cell: Cell) -> None:
    """The second and the third checkpoint of a run MUST hold the values at their calls, in every bit, with any
    options of functions, writers, planners and stagers, while tensors change, one grows and one is added.

    A partial load leaves what the checkpoint lacks as it was. Options that torch refuses on all ranks are listed in
    conformance/sweeps/checkpoint_storage.py; any other error is a fault.
    """
    require_no_wrong_result(measure(checkpoint_storage.sweep, cell), unit="runs")


@law(
    "CKPT-8",
    where="id in (dp2-fp32-default-meta, dp4-fp32-default-meta)",
    reference=CHECKPOINT,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_checkpoints_in_other_formats_hold_the_same_values(measure: Measure, cell: Cell) -> None:
    """Files of safetensors and of `torch.save` that are written or read by torch.distributed.checkpoint MUST hold the
    values at their calls, in every bit, with any options and in any layouts.
    """
    require_no_wrong_result(measure(checkpoint_formats.sweep, cell), unit="runs")


@law(
    "CKPT-9",
    where="id in (dp2-fp32-default-meta, dp4-fp32-default-meta)",
    reference=CHECKPOINT,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_a_save_that_fails_on_a_rank_raises_on_all(measure: Measure, cell: Cell) -> None:
    """A save that cannot plan, read or write on one rank MUST raise on all, at once or from its future, and the next
    one MUST succeed.

    Wrong if an incomplete checkpoint counts as saved: that shows when it is needed.
    """
    require_no_wrong_result(measure(checkpoint_failures.sweep, cell), unit="saves")


@law(
    "CKPT-10",
    where="id in (dp2-fp32-default-meta, dp2-tp2-fp32-default-meta-seed1)",
    reference=STATE_DICT,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_options_of_state_dicts_do_not_disturb_each_other(measure: Measure, cell: Cell) -> None:
    """A state dict MUST have the keys and values that its options say, and load them in every bit, a second and a third
    time, for tied and frozen parameters, buffers, states of modules, several optimizers and groups.

    What the options leave out stays as it was. Options that torch refuses on all ranks are listed in
    conformance/sweeps/checkpoint_options.py; any other error is a fault.
    """
    require_no_wrong_result(measure(checkpoint_options.sweep, cell), unit="runs")


def _require_continuation(run: Run, measure: Measure, cell: Cell) -> None:
    __tracebackhide__ = True
    record, uninterrupted = run(cell), run(without_checkpoint(cell))
    first = record.cell.steps_before_save
    compare.count(record.steps[0], name="first step after the checkpoint", expected=first, unit="steps")
    for when in [*(f"step{step}" for step in record.steps), "final"]:
        _require_same_tensors(record, uninterrupted, when)
    for resumed, never_stopped in zip(record.ranks, uninterrupted.ranks, strict=True):
        for name in ("steps", "batches", "model_inputs"):
            measured, expected = getattr(resumed, name), getattr(never_stopped, name)[-len(record.steps) :]
            if measured != expected:
                raise ConformanceFailure(f"rank {resumed.rank}: {name} are {measured}, expected {expected}")
        groups, expected_groups = resumed.optimizer_groups, never_stopped.optimizer_groups
        if not uninterrupted.steps_taken:
            groups, expected_groups = map(without_zero_counters, (groups, expected_groups))
        if groups != expected_groups:
            raise ConformanceFailure(
                f"rank {resumed.rank}: the optimizer ends with {groups}, expected {expected_groups}"
            )
    if is_emulated(measure, uninterrupted):
        compare_steps(uninterrupted)


def _require_same_tensors(record: Record, uninterrupted: Record, when: str) -> None:
    __tracebackhide__ = True
    kinds = uninterrupted.kinds(when)
    begun = [] if uninterrupted.steps_taken else state_of_no_step(record, kinds, when=when)
    if record.kinds(when) != sorted([*kinds, *begun]):
        raise ConformanceFailure(f"{when}: the resumed run has {record.kinds(when)}, expected {kinds}")
    for kind in kinds:
        key = f"{when}/{kind}"
        compare.bits(record.select(f"{key}/"), uninterrupted.select(f"{key}/"), name=key)


def state_of_no_step(record: Record, kinds: Sequence[str], *, when: str) -> list[str]:
    """Return the kinds of optimizer state that a resumed run has in addition to `kinds`, if all steps were skipped.

    torch saves zeros for such state (https://github.com/pytorch/pytorch/issues/164929).
    """
    begun = [kind for kind in record.kinds(when) if kind not in kinds]
    for kind in begun:
        nonzero = sum(int(tensor.count_nonzero()) for tensor in record.select(f"{when}/{kind}/").values())
        compare.count(nonzero, name=f"{when}/{kind} of no step", expected=0, unit="elements that are not zero")
    return begun


def without_zero_counters(groups: Sequence[OptimizerGroup]) -> list[OptimizerGroup]:
    """Return the groups without step counters at zero, which come with the state of no step.

    A fused optimizer has such a state by itself: it is called in steps that are skipped too.
    """
    return [replace(group, steps=[count for count in group.steps if count]) for group in groups]
