"""Set-up of a session: its options, read and checked once."""

import datetime
import importlib.metadata
import shlex
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.defects.catalogue import require_known
from conformance.judge.accepted import AcceptedFailure, load_accepted
from conformance.judge.support import Machine
from conformance.judge.waivers import KnownFailure, Waiver, expired_warning, profile_waivers
from conformance.numerics.arithmetic import Arithmetic
from conformance.plan.content import Profile
from conformance.plan.lock import parse_budget
from conformance.plan.matrix import TRAINERS, Case, Matrix, load_matrix
from conformance.plan.selection import parse, parse_laws
from conformance.project import LAWS_DIRECTORY, data_file, module_of
from conformance.pytest_plugin.cases import cases_of, parse_shard
from conformance.pytest_plugin.options import DEFAULT_PROFILE, DEFAULT_SEED, EXPLAIN_S, FAST_EXPLAIN_S
from conformance.pytest_plugin.values import parse_seconds, parse_seed, require_values
from conformance.report.diff import Baseline
from conformance.run import known_trainers
from conformance.run.devices.hardware import Hardware, find_hardware
from conformance.run.devices.leases import Leases
from conformance.run.devices.nvml import machine_devices
from conformance.run.pool import Pools, RunsTasks
from conformance.run.ranks.preload import EXPERIMENTS, SUBJECTS
from conformance.run.store import RecordStore
from conformance.torch_coverage.branches import require_coverage
from reference_trainer.checks import UsageError, not_negative, positive

POOLS = pytest.StashKey[RunsTasks]()
"""Key of a pytest configuration for a substitute of `Pools`, which runs tasks on other hosts too."""
HARDWARE = pytest.StashKey[Hardware]()
"""Key of a pytest configuration for the hardware of the pools at `POOLS`."""


@dataclass(frozen=True)
class SessionSetup:
    """Options of a session, and the objects that follow from the options."""

    name: str
    """Random name, the same in all processes of the session."""
    is_controller: bool
    """True in the process that the user started, which is the only one without workers."""
    directory: Path
    """Directory in which the session was started, without symbolic links."""
    report_directory: Path
    matrix: Matrix
    profile_name: str
    profile: Profile
    cases: tuple[Case, ...]
    waivers: list[Waiver]
    accepted: list[AcceptedFailure]
    """Failures that the owner of another trainer accepts."""
    expired_waivers: str
    """Warning of one line about waivers that have expired; empty if none has."""
    seed: int
    """Number that is added to the seed of every cell."""
    defect: str | None
    selection: str
    """Options that select cases of the profile, as they were given; empty if there are none."""
    trainer: str | None
    """Name in reports of the trainer that `--subject` names; None for the reference trainer."""
    baseline: Baseline | None
    store: RecordStore
    repro_options: tuple[str, ...]
    """Options with which pytest repeats a case."""
    faults: bool
    """True if faults are injected into another trainer's steps, to see whether the laws see them."""
    shrink_s: float
    """Time to search for the smallest failing cells, in seconds; none if not positive."""
    explain_s: float
    """Time to search for the first wrong places of failures, in seconds; none if not positive."""

    @property
    def known_failures(self) -> list[KnownFailure]:
        """Failures that are excused: those that an owner accepts, then those of torch."""
        return [*self.accepted, *self.waivers]

    @property
    def machine(self) -> Machine:
        """Hardware and software on which cases are judged."""
        return Machine(
            hardware=self.store.hardware,
            torch_version=self.store.torch_version,
            max_world_size=self.store.pools.max_world_size,
        )


def read_options(config: pytest.Config) -> SessionSetup:
    """Read the options of a session. Raises pytest.UsageError for options that cannot be used."""
    inherited: dict[str, Any] = getattr(config, "workerinput", {}).get("conformance", {})
    option = config.option
    report_directory = Path(inherited.get("report_directory", Path(option.report_dir).resolve()))
    name = inherited.get("session", uuid.uuid4().hex[:12])
    try:
        require_values(option)
        file = Path(option.matrix) if option.matrix else data_file("matrix.yaml")
        matrix = load_matrix(file)
        seed = parse_seed(option.seed)
        deadline_s = parse_seconds("--deadline", option.deadline, positive, "above 0") if option.deadline else None
        searches = {
            "shrink": option.shrink,
            "explain": option.explain or (FAST_EXPLAIN_S if option.fast else EXPLAIN_S),
        }
        shrink_s, explain_s = (
            parse_seconds(f"--{name}", given, not_negative, "0 for no search") for name, given in searches.items()
        )
        subject = option.subject
        if subject:
            known_trainers.resolve(subject)
            known_trainers.import_from_working_directory()
        profile_name = TRAINERS if subject else option.profile
        profile = matrix.profile(profile_name)
        _require_no_other_data(option)
        if option.torch_coverage:
            require_coverage(is_of_reference=not subject)
        selection = parse(option.cells) if option.cells is not None else None
        laws = matrix.trainer_laws() if subject else matrix.laws()
        laws = parse_laws(option.laws, laws) if option.laws is not None else laws
        budget_s = parse_budget(option.budget) if option.budget is not None else None
        trainer = known_trainers.name_of(option.subject) if subject else None
        if trainer is not None:
            planned = matrix.trainer_cases(trainer, only=selection, is_fast=option.fast)
        else:
            planned = matrix.cases(option.profile, only=selection, seed=seed, budget_s=budget_s)
        if not planned and selection is not None:
            for cell_id in selection.ids:
                matrix.cell(cell_id, trainer=trainer)
            planned = cases_of(option.cells, matrix, seed=seed, trainer=trainer)
        cases = tuple(case for case in planned if case.law in laws)
        defect = require_known(option.defect) if option.defect else None
        hardware = _hardware(config)
        today = datetime.date.today()
        waivers, expired = profile_waivers(file, matrix, profile, today=today)
        accepted: list[AcceptedFailure] = []
        if option.accepted:
            accepted = load_accepted(Path(option.accepted), matrix.trainer_cases(trainer or ""), today=today)
        return SessionSetup(
            name=name,
            is_controller=not hasattr(config, "workerinput"),
            directory=config.invocation_params.dir.resolve(),
            report_directory=report_directory,
            matrix=matrix,
            profile_name=profile_name,
            trainer=trainer,
            profile=profile,
            cases=parse_shard(option.shard).of(cases) if option.shard else cases,
            waivers=waivers,
            accepted=accepted,
            expired_waivers=expired_warning(expired),
            seed=seed,
            defect=defect,
            selection=_selection(config),
            baseline=Baseline(Path(option.baseline)) if option.baseline else None,
            store=RecordStore(
                directory=Path(option.record_dir).resolve() if option.record_dir else report_directory / "records",
                session=name,
                torch_version=importlib.metadata.version("torch"),
                defect=defect,
                deadline_s=deadline_s or profile.deadline_s,
                subject=subject,
                pools=config.stash.get(POOLS, None) or _pools(hardware, option),
                hardware=hardware,
                sweep_share=profile.sweep_share,
                covers_torch=option.torch_coverage,
            ),
            repro_options=tuple(_repro_options(option, defect)),
            faults=not (option.no_faults or option.fast),
            shrink_s=shrink_s,
            explain_s=explain_s,
        )
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _selection(config: pytest.Config) -> str:
    """Return the arguments and options that leave out cases of the profile, as a shell reads them."""
    option = config.option
    given = {
        "--budget": [option.budget],
        "--cells": [option.cells],
        "--laws": [option.laws],
        "--shard": [option.shard],
        "-k": [option.keyword],
        "-m": [option.markexpr],
        "--deselect": option.deselect or [],
        "--ignore": option.ignore or [],
        "--ignore-glob": option.ignore_glob or [],
    }
    collected = LAWS_DIRECTORY / "trainers" if option.subject else LAWS_DIRECTORY
    arguments = [] if any(_leads_to(collected, argument) for argument in config.args) else list(config.args)
    chosen = [word for name, values in given.items() for value in values if value for word in (name, str(value))]
    flags = ["--fast"] * bool(option.fast) + ["--lf"] * bool(getattr(option, "lf", False))
    return shlex.join([*arguments, *chosen, *flags])


def _leads_to(laws: Path, argument: str) -> bool:
    """Return whether a path, or a package after `--pyargs`, contains all of these laws."""
    packages = ("conformance", "conformance.laws", module_of(laws))
    return laws.is_relative_to(Path(argument).resolve()) or argument in packages


def _repro_options(option: Any, defect: str | None) -> list[str]:
    given = {
        "subject": option.subject,
        "matrix": option.matrix,
        "seed": parse_seed(option.seed) or None,
        "defect": defect,
        "accelerator": option.accelerator if option.accelerator != "auto" else None,
        "share-gpu": option.share_gpu if option.share_gpu != "auto" else None,
        "kernels": option.kernels if option.kernels != "torch" else None,
        "sums": option.sums if option.sums != "gloo" else None,
    }
    chosen = [f"--{name}={value}" for name, value in given.items() if value]
    return chosen if option.subject else [f"--profile={option.profile}", *chosen]


def _require_no_other_data(option: Any) -> None:
    """Raise UsageError for options that other people's trainers do not have: their cells and data are fixed."""
    given = {
        "--profile": option.profile != DEFAULT_PROFILE,
        "--budget": option.budget,
        "--seed": option.seed != DEFAULT_SEED,
    }
    unfit = [name for name, is_given in given.items() if is_given]
    if option.subject and unfit:
        raise UsageError(f"--subject has a profile and data of its own: leave out {', '.join(unfit)}")
    if not option.subject and (option.fast or option.accepted):
        raise UsageError("--fast and --accepted are for other people's trainers: name one with --subject")


def _hardware(config: pytest.Config) -> Hardware:
    """Return the hardware that the options allow to use. Raises UsageError as `find_hardware` does."""
    option, given = config.option, config.stash.get(HARDWARE, None)
    # Another trainer is judged on processors unless devices are asked for: it may name a device.
    accelerator = "cpu" if option.subject and option.accelerator == "auto" else option.accelerator
    arithmetic = Arithmetic.parse(kernels=option.kernels, sums=option.sums)
    if given is not None and accelerator != "cpu":
        if accelerator.startswith("sim"):
            raise UsageError("--accelerator sim: the simulated accelerator is for the ranks of one host")
        return given
    return find_hardware(machine_devices(), accelerator=accelerator, share_gpu=option.share_gpu, arithmetic=arithmetic)


def _pools(hardware: Hardware, option: Any) -> Pools:
    slots = [device.uuid for device in hardware.devices]
    tasks = SUBJECTS if option.subject else EXPERIMENTS
    return Pools(devices=Leases(slots) if slots else None, isolate=option.isolate, tasks=tasks)
