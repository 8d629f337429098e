"""Sequences of calls: their text, the grammar, and the smallest that fails."""

from random import Random

import pytest

from conformance.sweeps.call_sequences import (
    RULES,
    Call,
    Calls,
    calls_of,
    changes_unsharded,
    contains,
    draw,
    found_in,
    is_allowed,
    plainest,
    smallest,
    text_of,
)
from conformance.sweeps.life_cycle import SUSPECTS, expected, may_be_refused, singles_of
from conformance.sweeps.module_lives import NotComparable, PlainLife, ShardedLife

SAMPLES = [draw(Random(seed), length=8) for seed in range(300)]


def test_samples_are_allowed_and_equal_their_text() -> None:
    for calls in SAMPLES:
        assert is_allowed(calls)
        assert not changes_unsharded(calls)
        assert calls_of(text_of(calls)) == calls


def test_every_call_with_each_value_is_drawn_and_implemented() -> None:
    drawn = {call for calls in SAMPLES for call in calls}
    for name, rule in RULES.items():
        assert {Call(name, value) for value in rule.values} <= drawn
        assert rule.builds or hasattr(ShardedLife, name)
    assert hasattr(PlainLife, "train")


def test_plain_torch_performs_nearly_all_samples() -> None:
    assert len(SAMPLES) * 0.9 < len([calls for calls in SAMPLES if _is_comparable(calls)])


def _is_comparable(calls: Calls) -> bool:
    try:
        return len(expected(calls, 2, 0)) == len(calls)
    except NotComparable:
        return False


def test_suspects_are_sequences_of_the_grammar() -> None:
    assert len({calls_of(text) for text in SUSPECTS}) == len(SUSPECTS)


@pytest.mark.parametrize(
    "text",
    [
        "melt(second)",
        "freeze(third)",
        "train, param_dtype(bf16)",
        "restore",
        "synchronise(off), train, step",
        "unshard(first), step",
        "groups(root alone), evaluate(shared)",
        "groups(root alone), prefetch(forward)",
        "prefetch(forward), evaluate(shared)",
        "synchronise(shards), train, step",
    ],
)
def test_other_sequences_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a sequence"):
        calls_of(text)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("evaluate, freeze(root)", True),
        ("prefetch(forward), evaluate(partly), load(copied)", True),
        ("prefetch(forward), evaluate(partly), evaluate, load(copied)", False),
        ("prefetch(forward), train(partly), load(copied)", False),
        ("evaluate(partly), load(copied)", False),
        ("evaluate, freeze(second)", False),
        ("evaluate, reshard, step", False),
        ("reshard_after_forward(True), evaluate, step", False),
        ("reshard_after_forward(False), evaluate, freeze(second)", True),
        ("groups(root alone), evaluate, write(in place)", True),
        ("train, step", False),
        ("set_reshard_after_backward(False), train, step", True),
    ],
)
def test_changes_of_unsharded_parameters_are_told(text: str, changes: bool) -> None:
    assert changes_unsharded(calls_of(text)) == changes


def _fails(calls: Calls) -> bool:
    """Fail where something is frozen and later trained."""
    return any(
        contains(calls, (freeze, Call("train"))) for freeze in (Call("freeze", "second"), Call("freeze", "root"))
    )


def test_the_smallest_failing_sequence_has_the_plainest_values() -> None:
    calls = calls_of("param_dtype(bf16), train(twice), freeze(root), evaluate, train, zero_grad(none), train, step")
    assert text_of(smallest(calls, _fails)) == "freeze(root), train"
    assert text_of(plainest(smallest(calls, _fails), _fails)) == "freeze(second), train"


def test_smaller_sequences_are_of_the_grammar() -> None:
    calls = calls_of("keep, train, restore, step")
    assert text_of(smallest(calls, lambda fewer: Call("restore") in fewer)) == "keep, restore"


@pytest.mark.parametrize(
    ("text", "may_be"),
    [
        ("train, pickle, train", True),
        ("evaluate, cast(fp32), train(many)", True),
        ("cast(bf16), train", False),
        ("train(interleaved), step, train(many)", False),
        ("freeze(second), train", False),
    ],
)
def test_documented_calls_may_not_be_refused(text: str, may_be: bool) -> None:
    assert may_be_refused(calls_of(text)) == may_be


def test_a_known_sequence_is_found_with_other_values() -> None:
    calls = calls_of("step, train(twice), freeze(second), cast(fp64), train(many), train")
    known = calls_of("train, cast(bf16), train")
    assert found_in(calls, known, lambda each: (Call(each[0].name),)) == calls_of(
        "train(twice), cast(fp64), train(many)"
    )
    assert found_in(known, calls, lambda each: each) is None


def test_suspects_come_after_their_single_calls_that_plain_torch_performs() -> None:
    singles = singles_of([calls_of(text) for text in SUSPECTS])
    assert {(Call("train"),), (Call("freeze", "root"),), (Call("write", "data"),)} <= {*singles}
    assert all(is_allowed(single) and _is_comparable(single) for single in singles)
