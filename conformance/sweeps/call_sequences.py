"""Sequences of calls on a module over its life: a small grammar, samples of it by seed, and the smallest that fails.

A sequence is data: it is printed as `freeze(second), train, thaw(second), train`, read back from that text, and the
same on all ranks. Nothing of torch is needed here.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import cast


@dataclass(frozen=True)
class Call:
    """Call of an API, or a choice for the module that is built, with a value if there are several."""

    name: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.name}({self.value})" if self.value else self.name


Calls = tuple[Call, ...]


@dataclass(frozen=True)
class Progress:
    """State of a sequence on which the next call depends."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Choices for the module, by name."""
    is_built: bool = False
    synchronises: bool = True
    """True if backward reduces gradients."""
    has_pending: bool = False
    """True if there are gradients that no backward has reduced yet."""
    has_kept: bool = False
    """True if a state dict was kept."""
    has_unsharded: bool = False
    """True if a group was unsharded by hand."""
    unsharded: frozenset[str] = frozenset()
    """Groups that are left unsharded: by forward, or by backward where it does not reshard."""
    kept_by_forward: frozenset[str] = frozenset({"root"})
    """Groups that forward leaves unsharded."""
    reshards_after_backward: bool = True
    prefetches: bool = False
    """True if the first layer gathers the second one ahead in forward."""
    has_prefetched: bool = False
    """True if the second layer is gathered ahead of a forward that has left it out."""


@dataclass(frozen=True)
class Rule:
    """Rule of the grammar for the calls of one name."""

    values: tuple[str, ...] = ("",)
    """Values, the plainest first: a smallest sequence has the first one that fails."""
    weight: int = 2
    """Frequency, relative to other rules."""
    builds: bool = False
    """True for a choice for the module that is built, which precedes all calls."""
    needs: Callable[[Progress, str], bool] = lambda _progress, _value: True
    """Function that returns whether the call may come next with a value."""
    after: Callable[[Progress, str], Progress] = lambda progress, _value: progress
    """Function that returns the state after a call with a value."""


GROUPS = frozenset({"first", "second", "root"})
_CHANGES = frozenset({"freeze", "thaw", "write", "step", "hook", "load", "restore", "cast", "to_empty"})
"""Calls that change parameters, of which a layer that is gathered ahead of its forward sees nothing."""


def _at_rest(progress: Progress, _value: str) -> bool:
    """Return whether no gradient is pending, and no group was unsharded by hand.

    Gradients that wait for a later reduction are neither in `grad` nor documented to follow a call that changes
    parameters, clears gradients or steps.
    """
    return not progress.has_pending and not progress.has_unsharded


def _kept(progress: Progress, value: str) -> bool:
    return _at_rest(progress, value) and progress.has_kept


def _has_layers(progress: Progress, value: str) -> bool:
    """Return whether FSDP has a separate group for the layer that another module shares, as that module needs.

    That layer gathers no other one, which the other module does not have.
    """
    return value != "shared" or (_has_groups(progress, value) and not progress.prefetches)


def _has_groups(progress: Progress, _value: str) -> bool:
    return progress.options.get("groups") != "root alone"


def _trained(progress: Progress, _value: str) -> Progress:
    unsharded = frozenset() if progress.reshards_after_backward else GROUPS
    pending = not progress.synchronises
    return replace(progress, has_pending=pending, has_unsharded=False, unsharded=unsharded, has_prefetched=False)


def _computed(progress: Progress, value: str) -> Progress:
    has_prefetched = {"": False, "partly": progress.prefetches}.get(value, progress.has_prefetched)
    return replace(progress, unsharded=progress.unsharded | progress.kept_by_forward, has_prefetched=has_prefetched)


def _reset(progress: Progress, _value: str) -> Progress:
    return replace(_resharded(progress, ""), has_pending=False, has_prefetched=False)


def _resharded(progress: Progress, _value: str) -> Progress:
    return replace(progress, has_unsharded=False, unsharded=frozenset())


def _reshards_after_forward(progress: Progress, value: str) -> Progress:
    return replace(progress, kept_by_forward=GROUPS if value == "False" else frozenset())


RULES: Mapping[str, Rule] = {
    # The module and its options.
    "param_dtype": Rule(("bf16",), builds=True),
    "reduce_dtype": Rule(("fp32",), builds=True),
    "built_in": Rule(("bf16",), builds=True, weight=1),
    "groups": Rule(("root alone",), builds=True),
    "reshard_after_forward": Rule(("False", "True"), builds=True, after=_reshards_after_forward),
    "built_on": Rule(("meta",), builds=True),
    # Training.
    "train": Rule(
        ("", "twice", "losses", "retained", "evaluated", "interleaved", "many", "partly"), weight=10, after=_trained
    ),
    "forward": Rule(weight=2, after=_computed),
    "evaluate": Rule(("", "shared", "partly"), weight=4, needs=_has_layers, after=_computed),
    "abort": Rule(("forward", "evaluation", "loss", "backward"), weight=3, after=_reset),
    "synchronise": Rule(
        ("off", "on", "shards"), weight=4, after=lambda progress, value: replace(progress, synchronises=value == "on")
    ),
    "step": Rule(weight=4, needs=_at_rest),
    "zero_grad": Rule(("none", "zero"), needs=_at_rest),
    # Life cycle.
    "freeze": Rule(("second", "first", "first.weight", "root"), weight=4, needs=_at_rest),
    "thaw": Rule(("second", "first", "first.weight", "root"), weight=4, needs=_at_rest),
    "cast": Rule(("bf16", "fp32", "fp64"), needs=_at_rest, after=_resharded),
    "write": Rule(("in place", "data", "parameter"), weight=3, needs=_at_rest),
    "load": Rule(("copied", "assigned"), needs=_at_rest, after=_resharded),
    "keep": Rule(needs=_at_rest, after=lambda progress, _: replace(_resharded(progress, ""), has_kept=True)),
    "restore": Rule(needs=_kept, after=_resharded),
    "to_empty": Rule(("", "meta"), needs=_at_rest, after=_resharded),
    "hook": Rule(("forward", "forward_pre", "backward", "gradient")),
    "deepcopy": Rule(weight=1, needs=_at_rest),
    "pickle": Rule(weight=1, needs=_at_rest),
    "fully_shard": Rule(weight=1),
    # Sharding.
    "set_reshard_after_forward": Rule(("False", "True"), weight=1, after=_reshards_after_forward),
    "set_reshard_after_backward": Rule(
        ("False", "True"),
        weight=1,
        after=lambda progress, value: replace(progress, reshards_after_backward=value == "True"),
    ),
    "prefetch": Rule(
        ("forward", "backward", "none"),
        weight=2,
        needs=_has_groups,
        after=lambda progress, value: replace(progress, prefetches=value == "forward"),
    ),
    "unshard": Rule(("first", "root"), weight=1, after=lambda progress, _: replace(progress, has_unsharded=True)),
    "reshard": Rule(weight=2, after=_resharded),
}
"""Grammar of sequences: the calls by name."""

_CALL = re.compile(r"(\w+)(?:\(([^)]*)\))?")


def text_of(calls: Calls) -> str:
    """Return the text of a sequence, which `calls_of` reads."""
    return ", ".join(map(str, calls))


def calls_of(text: str) -> Calls:
    """Return the sequence with a text; raises ValueError for one that is not of the grammar."""
    calls = tuple(Call(name, value) for name, value in _CALL.findall(text))
    if text_of(calls) != text or not is_allowed(calls):
        raise ValueError(f"not a sequence of the grammar: {text}")
    return calls


def is_allowed(calls: Calls) -> bool:
    """Return whether the grammar has the sequence."""
    return all(_may_follow(call, progress) for call, progress in _walk(calls))


def changes_unsharded(calls: Calls) -> bool:
    """Return whether a parameter is frozen, thawed, written, stepped or hooked while its group is left unsharded.

    Loads and casts count as well if the group is gathered ahead of a forward that has left it out. Such a change is
    made to a copy that the next reshard drops, or is not seen by it: a known fault, of which a few sequences are tried,
    so that the others find something else.
    """
    return any(_is_unsharded(call, progress) for call, progress in _walk(calls))


def _is_unsharded(call: Call, progress: Progress) -> bool:
    if progress.has_prefetched and call.name in _CHANGES:
        return True
    if not progress.unsharded:
        return False
    if progress.options.get("groups") == "root alone" or call.name == "step":
        return call.name in ("freeze", "thaw", "write", "step", "hook")
    changed = {"freeze": call.value.partition(".")[0], "write": "second"}
    changed |= {"thaw": changed["freeze"], "hook": "second" if call.value == "gradient" else ""}
    return changed.get(call.name, "") in progress.unsharded


def _walk(calls: Calls) -> Iterator[tuple[Call, Progress]]:
    """Yield each call with the state before it."""
    progress = Progress()
    for call in calls:
        yield call, progress
        progress = _after(progress, call)


def draw(random: Random, *, length: int) -> Calls:
    """Return a random sequence of this many calls, behind up to three choices for the module."""
    choices = [name for name, rule in RULES.items() if rule.builds]
    sampled = sorted(random.sample(choices, random.randint(0, 3)), key=choices.index)
    calls = [Call(name, random.choice(RULES[name].values)) for name in sampled]
    for _ in range(length):
        *_, (_, progress) = _walk((*calls, Call("train")))
        following = [Call(name, value) for name, rule in RULES.items() if not rule.builds for value in rule.values]
        following = [call for call in following if _may_follow(call, progress) and not _is_unsharded(call, progress)]
        weights = [RULES[call.name].weight / len(RULES[call.name].values) for call in following]
        calls += random.choices(following, weights)
    return tuple(calls)


def _may_follow(call: Call, progress: Progress) -> bool:
    rule = RULES.get(call.name)
    if rule is None or call.value not in rule.values:
        return False
    if rule.builds:
        return not progress.is_built and call.name not in progress.options
    return rule.needs(progress, call.value)


def _after(progress: Progress, call: Call) -> Progress:
    rule = RULES.get(call.name, Rule())
    if rule.builds:
        progress = replace(progress, options={**progress.options, call.name: call.value})
        return rule.after(progress, call.value)
    return rule.after(replace(progress, is_built=True), call.value)


def contains(calls: Calls, fewer: Calls) -> bool:
    """Return whether a sequence has the calls of another one in their order, with or without calls between them."""
    rest = iter(calls)
    return all(call in rest for call in fewer)


def found_in(calls: Calls, fewer: Calls, alike: Callable[[Calls], Calls]) -> Calls | None:
    """Return the first calls of a sequence that are those of another one, as `alike` spells both; None without them.

    >>> found_in((Call("train", "twice"), Call("step")), (Call("train"),), lambda calls: (Call(calls[0].name),))
    (Call(name='train', value='twice'),)
    """
    rest = iter(calls)
    found = tuple(next((call for call in rest if alike((call,)) == alike((each,))), None) for each in fewer)
    return None if None in found else cast("Calls", found)


def smallest(calls: Calls, fails: Callable[[Calls], bool]) -> Calls:
    """Return a smallest sequence that fails as a failing one does: without any one call it does not."""
    longer: Calls = ()
    while longer != calls:
        longer = calls
        for index in reversed(range(len(calls))):
            fewer = (*calls[:index], *calls[index + 1 :])
            if is_allowed(fewer) and fails(fewer):
                calls = fewer
    return calls


def plainest(calls: Calls, fails: Callable[[Calls], bool]) -> Calls:
    """Return a failing sequence with the plainest values with which it fails."""
    for index, call in enumerate(calls):
        for plainer in _plainer(call):
            candidate = (*calls[:index], plainer, *calls[index + 1 :])
            if is_allowed(candidate) and fails(candidate):
                calls = candidate
                break
    return calls


def _plainer(call: Call) -> Iterator[Call]:
    values: Sequence[str] = RULES[call.name].values
    for value in values[: values.index(call.value)]:
        yield Call(call.name, value)
