"""Life cycles of modules sharded by FSDP2: random sequences of calls, each compared with the same calls on plain torch.

After each call parameters, gradients, `requires_grad`, the output and the dtypes of collectives are compared; at the
end the memory that is held, too.
"""

import gc
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from random import Random

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.collectives import CollectiveLog
from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.host_storages import HostStorages
from conformance.run.experiment import Needs
from conformance.sweeps.call_sequences import (
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
from conformance.sweeps.drawing import share_on
from conformance.sweeps.layouts import difference
from conformance.sweeps.module_lives import WAYS, NotComparable, PlainLife, Seen, ShardedLife
from conformance.sweeps.trials import End, Ended, Swept, Trials
from reference_trainer.mesh import fsdp_mesh

SEQUENCES = {2: 30, 4: 100}
"""Number of random sequences, by the number of ranks: of two, in `pr`, few seconds."""
_LENGTHS = (4, 10)
_RELEASES = 20
"""Number of times that memory is measured again, 10 ms apart, before it counts as held."""


def expected(calls: Calls, ranks: int, rank: int, *, has_replicas: bool = False) -> list[Seen]:
    """Return the states of a plain module after each call; raises NotComparable if plain torch refuses a call."""
    life = PlainLife(calls, ranks, rank, has_replicas=has_replicas)
    seen = []
    for call in calls:
        try:
            life.call(call)
        except NotComparable:
            raise
        except Exception as error:
            raise NotComparable(f"{call}: {error!r:.200}") from error
        seen.append(life.seen(call))
    return seen


def differences(calls: Calls, wanted: Sequence[Seen], rank: int, mesh: DeviceMesh) -> dict[str, str]:
    """Perform the calls on a sharded module; returns the faults after the first call that has any, with texts."""
    storages, log = HostStorages(), CollectiveLog()
    with storages.installed(), DispatchTap([log.listen], outcomes=[storages.listen_to_outcomes]):
        life = ShardedLife(calls, mesh, rank)
        for call, seen in zip(calls, wanted, strict=True):
            begin = log.count()
            life.call(call)
            sent = [(each.kind, each.dtype) for each in log.facts(None)[begin:]]
            if faults := dict([*_wire_faults(sent, seen), *_state_faults(life, seen)]):
                return {fault: f"after {call}: {text}" for fault, text in faults.items()}
        life.reshard()
        life.output = None
        if faults := dict(_state_faults(life, wanted[-1])) if wanted else {}:
            return {fault: f"at the end: {text}" for fault, text in faults.items()}
        needed = life.held_bytes()
        # The last parameter that a new one replaces is kept until the next forward.
        held = needed if Call("write", "parameter") in calls else _settled(storages, needed)
    return {"memory": f"{held} bytes are held at the end, of which {needed} are needed"} if held > needed else {}


def _settled(storages: HostStorages, needed: int) -> int:
    """Return the bytes that are held when nothing more is released: cycles of Python, and gloo's threads, hold some."""
    for _ in range(_RELEASES):
        if storages.held_bytes <= needed:
            break
        gc.collect()
        time.sleep(0.01)
    return storages.held_bytes


def _wire_faults(sent: Sequence[tuple[str, str]], seen: Seen) -> Iterator[tuple[str, str]]:
    """Yield collectives in another dtype than the documented one, and those of calls that need none."""
    for kind, dtype in sent:
        wanted = str(seen.dtypes.get(kind, "none")).removeprefix("torch.")
        if dtype != wanted:
            yield "collective", f"{kind} of {dtype}, expected {wanted}"


def _state_faults(life: ShardedLife, seen: Seen) -> Iterator[tuple[str, str]]:
    if life.output is not None and seen.output is not None:
        differing = difference(life.output, seen.output, bound=0.0)
        yield from [("output", differing)] if differing else []
    for name, parameter in life.net.named_parameters():
        value, grad = seen.parameters[name], seen.grads[name]
        if parameter.requires_grad != seen.requires_grad[name]:
            yield "requires_grad", f"{name}: {parameter.requires_grad}"
        if not isinstance(parameter, DTensor):  # unsharded: the next output tells of its value
            continue
        for fault, measured, wanted in (("parameter", parameter, value), ("gradient", parameter.grad, grad)):
            if text := difference(measured, wanted, bound=0.0):
                yield fault, f"{name}: {text}"


WORKFLOWS: tuple[str, ...] = (
    # Micro-batches without a reduction, a layer that is frozen at first, a moving average, and an iteration that fails.
    "synchronise(off), train, synchronise(on), train, step",
    "freeze(second), evaluate, thaw(second), train, step",
    "keep, train, step, restore, evaluate",
    "prefetch(forward), abort(evaluation), load(copied), evaluate",
)
"""Sequences of every training of their kind, which a share of the samples tries, too."""
_COMPUTING = ("train", "forward", "evaluate")
_UNSHARDING = ("unshard(first)", "unshard(root)")
REFUSED: tuple[str, ...] = (
    "fully_shard",
    "deepcopy",
    "pickle",
    "write(parameter), cast(bf16)",
    "write(parameter), to_empty",
    *(f"{each}, evaluate(shared)" for each in _COMPUTING),
    *(f"evaluate(shared), {each}" for each in _COMPUTING),
    *(f"{before}, cast(bf16), {after}" for before in _COMPUTING for after in (*_COMPUTING, *_UNSHARDING)),
)
"""Sequences that torch refuses, and says why; the refusal of one that has none of them is a fault.

Without them, documented calls would pass where they raise on all ranks.
"""
SUSPECTS: tuple[str, ...] = (
    # Each has a program in findings/.
    "built_in(bf16), reduce_dtype(fp32), freeze(second), evaluate, thaw(second), train",
    "write(data)",
    *(f"{before}, write(parameter), {after}" for before in _COMPUTING for after in _COMPUTING),
    "train, evaluate, step, evaluate",
    "evaluate, freeze(root)",
    "synchronise(off), train, synchronise(on), hook(gradient), train(twice)",
    "synchronise(shards), train, synchronise(on), train(partly)",
    "prefetch(forward), evaluate(partly), load(copied), evaluate",
    # In any way: where the gradients of one rank alone are wrong, the others would wait for it in the next training.
    *(f"abort(backward), {Call('train', way)}" for way in WAYS),
    "synchronise(off), train, abort(forward), synchronise(on), train",
    *REFUSED,
)
"""Smallest sequences that fail in some version of torch: tried first, since finding them in a longer one takes long."""


@experiment(needs=Needs.TRAINING, takes_share=True)
def sweep(rank: RankWorld) -> Swept:
    """Perform random sequences of calls, of which the seed of the cell decides."""
    return LifeSweep(rank).swept()


class LifeSweep:
    """Sequences that all ranks try; of a wrong or refused one the smallest is kept, and none that has it is tried.

    A sequence with a call that is refused proves nothing about the calls behind it.
    """

    def __init__(self, rank: RankWorld) -> None:
        self._world, self._rank, self._size = rank, rank.rank, rank.size
        mesh = fsdp_mesh(rank.mesh)
        self._trials, self._has_replicas = Trials(mesh), mesh.ndim > 1
        self._excluded: list[Calls] = []
        self._swept = Swept(computed={_SUBJECT: 0})
        self._subjects = sorted(rank.subjects)
        self._random = Random(rank.config.seed)
        self._tried: dict[Calls, Ended | None] = {}

    def swept(self) -> Swept:
        """Return the outcome: the number of right sequences, and the smallest that are refused or wrong."""
        named = [calls for text in self._subjects if (calls := read(text)) is not None]
        workflows, suspects = (list(map(calls_of, group)) for group in (WORKFLOWS, SUSPECTS))
        if named:
            self._try_smallest(((), *named))
        elif self._world.sweep_share < 1.0:
            self._try_smallest(((), *workflows))
            self._excluded += suspects
            self._try_share()
        else:
            self._try_smallest(((), *workflows, *singles_of(suspects), *suspects))
            for _ in range(SEQUENCES[self._size]):
                if () not in self._excluded:
                    self._try(self._sampled())
        return self._swept

    def _try_smallest(self, sequences: Iterable[Calls]) -> None:
        """Try sequences that are taken as they are if they fail."""
        for calls in sequences:
            if not self._is_excluded(calls) and (ended := self._judged(calls)) is not None:
                self._report(calls, calls, ended)

    def _try_share(self) -> None:
        """Try a share of the random sequences, with every call that they have, and every change of a call's value."""
        if () not in self._excluded:
            sequences = [self._sampled() for _ in range(SEQUENCES[self._size])]
            for calls in share_on(self._world, sequences, _kinds):
                self._try(calls)

    def _sampled(self) -> Calls:
        """Return a new sequence that plain torch performs, and that has none that is excluded."""
        while True:
            calls = draw(self._random, length=self._random.randint(*_LENGTHS))
            if not self._is_excluded(calls) and self._expected(calls) is not None:
                return calls

    def _is_excluded(self, calls: Calls) -> bool:
        return any(contains(calls, excluded) for excluded in self._excluded)

    def _has_another(self, calls: Calls) -> bool:
        """Return whether a sequence has an excluded one and more: it may fail for that one's reason alone."""
        return calls not in self._excluded and self._is_excluded(calls)

    def _expected(self, calls: Calls) -> list[Seen] | None:
        try:
            return expected(calls, self._size, self._rank, has_replicas=self._has_replicas)
        except NotComparable:
            return None

    def _try(self, calls: Calls) -> None:
        """Try a sequence, of which the smallest is kept if it fails."""
        if self._is_excluded(calls) or (ended := self._judged(calls)) is None:
            return
        calls = self._narrowed(calls, ended.end)
        known = changes_unsharded(calls)

        def ends(plainer: Calls) -> bool:
            return (
                known == changes_unsharded(plainer)
                and not self._has_another(plainer)
                and self._ends(plainer, ended.end)
            )

        self._report(calls, plainest(calls, ends), ended)

    def _judged(self, calls: Calls) -> Ended | None:
        """Return how a sequence fails; None, and count it, if it is right."""
        ended = self._ended(calls)
        if ended is None:
            raise RuntimeError(f"plain torch cannot perform {text_of(calls)}")
        if ended.end is not End.RIGHT:
            return ended
        self._swept.count(ended.outcome)
        self._swept.computed[_SUBJECT] += 1
        return None

    def _narrowed(self, calls: Calls, end: End | None) -> Calls:
        """Return the smallest sequence that ends so: one that is known, if it does with the values of these calls."""
        known = changes_unsharded(calls)

        def ends(fewer: Calls) -> bool:
            return is_allowed(fewer) and known == changes_unsharded(fewer) and self._ends(fewer, end)

        found = (found_in(calls, excluded, _in_any_way) for excluded in self._excluded)
        return next((fewer for fewer in found if fewer is not None and ends(fewer)), None) or smallest(calls, ends)

    def _report(self, calls: Calls, plain: Calls, ended: Ended) -> None:
        """Record a failure, of the plainest sequence if it is new, and exclude both."""
        may_refuse = may_be_refused(plain)
        self._swept.count(ended.judged(may_refuse=may_refuse).outcome)
        is_known = plain in self._excluded
        self._excluded += [calls, plain]
        if not is_known:
            judged = (self._ended(plain) or ended).judged(may_refuse=may_refuse)
            self._swept.add_failure(text_of(plain), judged, _SUBJECT)

    def _ends(self, calls: Calls, end: End | None) -> bool:
        ended = self._ended(calls)
        return ended is not None and ended.end is end

    def _ended(self, calls: Calls) -> Ended | None:
        """Return how a sequence ends on all ranks; None if plain torch cannot perform it."""
        if calls not in self._tried:
            wanted = self._expected(calls)
            ended = None if wanted is None else self._trials.ended(partial(differences, calls, wanted, self._rank))
            self._tried[calls] = ended
        return self._tried[calls]


_SUBJECT = "sequences"


def may_be_refused(calls: Calls) -> bool:
    """Return whether a sequence has one that torch refuses, with any dtype and way of training."""
    return any(contains(_in_any_way(calls), _in_any_way(calls_of(text))) for text in REFUSED)


def _in_any_way(calls: Calls) -> Calls:
    """Return the calls without dtypes and ways; an iteration that is aborted has begun with a forward."""
    plain = {name: Call(name) for name in ("cast", "train", "to_empty")} | {"abort": Call("forward")}
    return tuple(plain.get(call.name, call) for call in calls)


def _kinds(calls: Calls) -> set[str]:
    """Return the calls of a sequence, and their changes of a value, such as `synchronise(off), synchronise(on)`."""
    pairs = itertools.combinations(calls, 2)
    return {*map(str, calls), *(text_of(pair) for pair in pairs if pair[0].name == pair[1].name and pair[0] != pair[1])}


def singles_of(sequences: Iterable[Calls]) -> list[Calls]:
    """Return the calls of sequences that may stand alone: a fault of one is no fault of the others beside it."""
    return [(call,) for call in dict.fromkeys(itertools.chain(*sequences)) if is_allowed((call,))]


def read(text: str) -> Calls | None:
    """Return the sequence with a text; None for a subject of another sweep."""
    try:
        return calls_of(text)
    except ValueError:
        return None
