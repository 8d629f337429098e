"""`python -m conformance sim operators`: torch's operator database on the simulated device against the CPU."""

import argparse
import sys
from pathlib import Path

from conformance.cli.command import Answer, Commands
from conformance.project import PROJECT, require_checkout
from reference_trainer.checks import UsageError

_DOCS_FILE = PROJECT / "docs" / "sim" / "operators.md"
_PROGRESS_CASES = 500


def add_parser(commands: Commands) -> None:
    """Add the command."""
    text = "call each operator of torch's database on the device and on the CPU: are results equal in every bit?"
    parser = commands.add_parser("operators", help=text)
    parser.add_argument("--only", metavar="NAME[,NAME]", help="operators such as linalg.svd (default: all)")
    parser.add_argument("--dtypes", metavar="DTYPE[,DTYPE]", help="such as float32,bfloat16 (default: six)")
    parser.add_argument(
        "--schedule",
        default="lazy,eager",
        metavar="S[,S]",
        help="schedules, one by one (default: %(default)s)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("conformance-operators.jsonl"),
        metavar="FILE",
        help="outcomes, reused as long as the device is the same (default: %(default)s)",
    )
    parser.add_argument("--write", action="store_true", help="also write docs/sim/operators.md")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Judge the operators; status 1 if one is not equal and has no reason.

    Raises UsageError for an unknown operator, dtype or schedule, for docs of some operators only, and without torch's
    database; Unsupported if the device cannot be built.
    """
    if options.write:
        require_checkout("--write")
        if options.only or options.dtypes:
            raise UsageError("--write writes a row for every operator: leave out --only and --dtypes")
    from conformance.sim.schedules import Schedule
    from conformance.sim_runs.operators import database, rendering
    from conformance.sim_runs.operators.cases import DTYPES, cases
    from conformance.sim_runs.operators.sweep import Outcomes, sweep

    names = options.only.split(",") if options.only else list(database.operators())
    if unknown := [name for name in names if name not in database.operators()]:
        raise UsageError(f"torch's database has no operator {unknown[0]}")
    todo = cases(names, options.dtypes.split(",") if options.dtypes else list(DTYPES))
    judged = {}
    for schedule in options.schedule.split(","):
        Schedule.parse(schedule)
        judged[schedule] = sweep(todo, Outcomes(options.results, schedule), _show_progress)
    if options.write:
        _DOCS_FILE.parent.mkdir(exist_ok=True)
        _DOCS_FILE.write_text(rendering.as_markdown(judged) + "\n")
    return Answer(rendering.as_text(judged), int(rendering.has_problems(judged)))


def _show_progress(done: int, total: int) -> None:
    if done % _PROGRESS_CASES == 0:
        print(f"{done} of {total}", file=sys.stderr, flush=True)
