"""`python -m conformance explain CASE`: where one case goes wrong first, by one more run of its cell, with taps."""

import argparse
import importlib
import importlib.metadata
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tabulate import tabulate

from conformance.cli.command import Answer, Commands, add_limit, add_matrix
from conformance.defects.catalogue import require_known
from conformance.judge.judge import Judged, judge
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine
from conformance.judge.verdicts import Verdict
from conformance.outcomes import CellFailed
from conformance.plan.matrix import Case, Matrix, load_matrix
from conformance.plan.selection import nearest
from conformance.pytest_plugin.locating import Explained, localiser
from conformance.report.location import Location
from conformance.report.module_tree import tree_lines
from conformance.run import known_trainers
from conformance.run.devices.hardware import find_hardware
from conformance.run.devices.leases import Leases
from conformance.run.devices.nvml import machine_devices
from conformance.run.pool import Pools
from conformance.run.store import RecordStore
from reference_trainer.checks import UsageError

_FORMS = "write LAW/CELL, such as PAR-1/dp2-fp32-default-meta, or LAW/TRAINER/CELL"


class CaseExplained(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a case, and the first wrong place of its cell, as `--json` prints them."""

    case: str
    cell: str
    verdict: str
    reason: str
    location: Location | None
    """First wrong place; None if no tapped tensor or collective is wrong."""
    location_failure: str
    """Reason why the run with taps did not finish; empty if it did."""

    @property
    def status(self) -> int:
        """Exit status: 1 if the case fails and no place was found, or if the run with taps did not finish."""
        is_right = self.verdict == Verdict.PASS and not self.location_failure
        return 0 if self.location is not None or is_right else 1


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "explain", help="where does a case go wrong first? exit status 1 if it fails and no place is found"
    )
    add_matrix(parser)
    parser.add_argument("case", metavar="CASE", help="LAW/CELL, or LAW/TRAINER/CELL, as reports name it")
    parser.add_argument("--subject", metavar="TRAINER", help="another trainer, as `judge` takes it")
    parser.add_argument("--defect", metavar="ID", help="inject a known fault, or FILE.py:NAME")
    parser.add_argument(
        "--accelerator", default="auto", metavar="WHAT", help="auto, cpu, cuda or sim[:SCHEDULE] (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print verdict and location as JSON")
    add_limit(parser, of="the runs of the case", default=60.0)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Judge a case and find its first wrong place.

    Raises UsageError for an unknown case, trainer or defect, and for a case that this machine cannot judge.
    """
    case, subject = read_case(options.case, load_matrix(options.matrix), subject=options.subject)
    with _store(options, subject) as store:
        shown = explained_case(case, store, localiser())
    if options.json:
        return Answer(msgspec.json.format(msgspec.json.encode(shown), indent=1).decode(), shown.status)
    return Answer("\n".join(as_lines(shown)), shown.status)


def read_case(text: str, matrix: Matrix, *, subject: str | None = None) -> tuple[Case, str | None]:
    """Return the case with this id, and its trainer as a user names it; None for the reference trainer.

    Raises UsageError, with the nearest ids, for an unknown law, trainer or cell, and for a law that is not judged on
    the cell.
    """
    law, _, rest = text.partition("/")
    named, _, cell_id = rest.rpartition("/")
    if not cell_id:
        raise UsageError(f"`{text}` is no id of a case: {_FORMS}")
    subject = subject or named or None
    trainer = None
    if subject is not None:
        known_trainers.resolve(subject)
        trainer = known_trainers.name_of(subject)
    if named and named != trainer:
        raise UsageError(f"`{text}` is a case of {named}, and --subject is {subject}: leave out one of them")
    laws = matrix.laws() if trainer is None else matrix.trainer_laws()
    if law.upper() not in {known.upper() for known in laws}:
        raise UsageError(f"no law {'of any trainer ' if trainer else ''}has the id `{law}`{_hint(law, laws)}")
    law = next(known for known in laws if known.upper() == law.upper())
    case = Case(law, matrix.cell(cell_id, trainer=trainer), trainer)
    if not matrix.is_possible(case):
        rule = matrix.content.exclusion_of(case.cell)
        why = f"cells with {rule.when} cannot be: {rule.reason}" if rule else f"see `conformance show {law}`"
        raise UsageError(f"{law} is not judged on {cell_id}: {why}")
    return case, subject


def explained_case(case: Case, store: RecordStore, explained: Explained) -> CaseExplained:
    """Return the verdict on a case, and the first wrong place that `explained` finds; a case that passes may have one.

    Raises UsageError for a case that this machine cannot judge, and the error of a law that is wrong itself.
    """
    machine = Machine(
        hardware=store.hardware, torch_version=store.torch_version, max_world_size=store.pools.max_world_size
    )
    judged = _judged(case, store, machine)
    location, failure = None, ""
    try:
        location = explained(case, store, machine=machine, measured=judged.measured, reason=judged.reason)
    except CellFailed as failed:
        failure = failed.failure.reason
    return CaseExplained(
        case=case.id,
        cell=case.cell.id,
        verdict=judged.verdict.value,
        reason=judged.reason,
        location=location,
        location_failure=failure,
    )


def as_lines(shown: CaseExplained) -> Iterator[str]:
    """Yield the verdict, the first wrong place in one line, further facts, and the tree of modules."""
    yield f"{shown.verdict}: {shown.case}{f': {shown.reason}' if shown.reason else ''}"
    if shown.location_failure:
        yield f"no first wrong place: the run with taps did not finish: {shown.location_failure}"
    elif shown.location is None and shown.verdict == Verdict.PASS:
        yield f"nothing is wrong on {shown.cell}"
    elif shown.location is None:
        yield f"no first wrong place: no tensor or collective with a tap is wrong on {shown.cell}"
    else:
        yield from ("", shown.location.sentence, "", tabulate(_facts(shown.location).items(), tablefmt="plain"))
        if shown.location.tree:
            yield from ("", *tree_lines(shown.location))


def _facts(location: Location) -> Mapping[str, str]:
    """Return the facts of a location that its sentence leaves out."""
    facts = {
        "cell": location.cell,
        "kind": location.family,
        "module": location.module_class,
        "ranks": ", ".join(map(str, location.ranks)),
        "took": f"{location.seconds:.1f} s",
    }
    return {name: fact for name, fact in facts.items() if fact}


def _judged(case: Case, store: RecordStore, machine: Machine) -> Judged:
    asserted = asserted_laws()[case.law]
    if store.subject is not None:
        importlib.import_module("conformance.subjects.session").require_judgeable(store, runs_cases=False)
    judged = judge(case, asserted.law, asserted.test, store, machine=machine)
    if judged.verdict == Verdict.UNSUPPORTED:
        raise UsageError(f"{case.id} cannot be judged here: {judged.reason}")
    if judged.verdict == Verdict.ERROR and judged.error is not None:
        raise judged.error
    return judged


@contextmanager
def _store(options: argparse.Namespace, subject: str | None) -> Iterator[RecordStore]:
    """Open a store whose records are removed at the end."""
    defect = require_known(options.defect) if options.defect else None
    hardware = find_hardware(machine_devices(), accelerator=options.accelerator, share_gpu="auto")
    slots = [device.uuid for device in hardware.devices]
    if subject is not None:
        known_trainers.import_from_working_directory()
    with tempfile.TemporaryDirectory() as directory:
        store = RecordStore(
            directory=Path(directory),
            session="explain",
            torch_version=importlib.metadata.version("torch"),
            defect=defect,
            deadline_s=options.limit,
            pools=Pools(devices=Leases(slots) if slots else None),
            hardware=hardware,
            subject=subject,
        )
        try:
            yield store
        finally:
            store.close()


def _hint(given: str, ids: tuple[str, ...]) -> str:
    near = nearest(given, ids)
    return f"; near: {', '.join(near)}" if near else f": {', '.join(ids)}"
