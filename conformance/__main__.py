"""Beside pytest: what there is (list, show, laws) and would need (predict), what is caught (defects); verify, html,
diff, versions and waive for reports; spmd."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from conformance.cli.describe import list_cases, list_cells, show
from conformance.plan.matrix import load_matrix
from conformance.plan.selection import parse
from conformance.project import PROJECT
from conformance.pytest_plugin.plugin import DEFAULT_PROFILE

_EXIT_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Print what was asked for; returns 0, 1 for problems, or 2 with one line on stderr for what cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        status, text = _answer(options)
    except ValueError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return _EXIT_USAGE
    if not text:
        return status
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _answer(options: argparse.Namespace) -> tuple[int, str]:
    """Exit status and text."""
    match options.command:
        case "predict":
            return 0, _prediction(options)
        case "defects":
            return _defects(options)
        case "verify":
            return _verification(options)
        case "laws":
            return 0, _laws(options)
        case "html":
            return 0, _page(options)
        case "versions":
            return 0, _versions(options)
        case "waive":
            return 0, _drafts(options)
        case "diff":
            return _difference(options)
        case "spmd":
            from conformance.cli.spmd import run_agent

            return run_agent(options.report_dir, profile=options.profile, more=options.more), ""
        case _:
            return 0, _description(options)


def _description(options: argparse.Namespace) -> str:
    matrix = load_matrix(options.matrix)
    if options.command == "show":
        return show(matrix, options.id)
    only = parse(options.cells) if options.cells else None
    return (list_cases if options.cases else list_cells)(matrix, options.profile, only=only)


def _defects(options: argparse.Namespace) -> tuple[int, str]:
    from conformance.detection.kill_matrix import kill_matrix
    from conformance.detection.rendering import as_markdown, as_page, as_text

    found = kill_matrix(profile=options.profile, directory=options.report_dir, workers=options.workers, only=options.id)
    (options.report_dir / "kill_matrix.html").write_text(as_page(found))
    if options.write_docs:
        (PROJECT / "docs" / "detection" / "kill_matrix.md").write_text(as_markdown(found) + "\n")
    return int(bool(found.problems)), as_text(found)


def _verification(options: argparse.Namespace) -> tuple[int, str]:
    from conformance.cli.verify import verify

    found = verify(options.report_dir, matrix_file=options.matrix, records=options.record_dir)
    return int(bool(found.problems)), str(found)


def _laws(options: argparse.Namespace) -> str:
    from conformance.cli.laws_page import PAGE, laws_page

    if options.write_docs:
        PAGE.write_text(laws_page())
        return f"written: {PAGE}"
    return laws_page()


def _page(options: argparse.Namespace) -> str:
    from conformance.report.diff import read_report
    from conformance.report.html import report_page

    file = options.report_dir / "report.html"
    baseline = read_report(options.baseline) if options.baseline else None
    file.write_text(report_page(read_report(options.report_dir), baseline=baseline))
    return f"written: {file}"


def _versions(options: argparse.Namespace) -> str:
    from conformance.cli.versions import versions_table
    from conformance.report.diff import read_report

    return versions_table([read_report(directory) for directory in options.report_dir])


def _drafts(options: argparse.Namespace) -> str:
    import datetime

    from conformance.cli.waiver_drafts import draft_waivers
    from conformance.report.diff import read_report

    return draft_waivers(read_report(options.report_dir), today=datetime.date.today())


def _difference(options: argparse.Namespace) -> tuple[int, str]:
    import msgspec

    from conformance.report.diff import diff, read_report
    from conformance.report.diff_text import as_markdown, as_page, as_text

    found = diff(read_report(options.before), read_report(options.after), any_suite=options.any_suite)
    if options.html:
        options.html.write_text(as_page(found))
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    else:
        text = as_markdown(found) if options.markdown else as_text(found)
    return found.exit_status, text


def _prediction(options: argparse.Namespace) -> str:
    # Imported only now: this needs torch, which takes seconds to load.
    from conformance.cli.predict import Request, as_json, as_picture, as_text, prediction

    request = Request(**{name: getattr(options, name) for name in Request.__struct_fields__})
    found = prediction(request)
    if options.picture:
        options.picture.write_text(as_picture(request, found))
    if not options.simulate:
        return as_json(found) if options.json else as_text(request, found)
    from conformance.cli import simulate as beside

    simulated = beside.simulation(request)
    if options.json:
        return as_json(found, simulation=simulated)
    return f"{as_text(request, found)}\n\n{beside.as_text(found, simulated)}"


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--matrix", type=Path, default=PROJECT / "matrix.yaml", metavar="FILE", help="another matrix")
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", parents=[shared], help="the cells of a profile with the laws judged on them")
    listing.add_argument("--profile", default=DEFAULT_PROFILE, metavar="P", help="default: %(default)s")
    listing.add_argument("--cells", metavar="EXPR", help="only these cells, such as 'tp=2 and precision=fp32'")
    listing.add_argument("--cases", action="store_true", help="one case id (LAW/CELL) per line instead of the table")
    showing = commands.add_parser("show", parents=[shared], help="all about one law, cell or defect")
    showing.add_argument("id", metavar="ID", help="such as PAR-1, dp2-tp2-fp32-default-meta or grads-summed")
    stating = commands.add_parser("laws", help="all laws with their references and proofs, as markdown")
    stating.add_argument("--write-docs", action="store_true", help="into docs/laws.md")
    _add_prediction(commands)
    _add_defects(commands)
    verifying = commands.add_parser(
        "verify", parents=[shared], help="derive the verdicts of a report again from its raw records"
    )
    verifying.add_argument("report_dir", type=Path, metavar="DIR", help="what --report-dir was")
    verifying.add_argument("--record-dir", type=Path, metavar="DIR", help="what --record-dir was, if it was given")
    _add_diff(commands)
    drawing = commands.add_parser("html", help="write report.html again, from report.json")
    drawing.add_argument("report_dir", type=Path, metavar="DIR", help="the report's directory")
    drawing.add_argument("--baseline", type=Path, metavar="DIR", help="a report whose losses to draw beside")
    tabulating = commands.add_parser("versions", help="laws by version of torch, from a report of each")
    tabulating.add_argument("report_dir", type=Path, nargs="+", metavar="DIR", help="reports, in the order of columns")
    drafting = commands.add_parser("waive", help="draft waivers of what has failed, to be completed in waivers.yaml")
    drafting.add_argument("--from", type=Path, required=True, dest="report_dir", metavar="DIR", help="a report")
    spanning = commands.add_parser("spmd", help="under torchrun: a session whose worlds span all hosts of the job")
    spanning.add_argument("--profile", default=DEFAULT_PROFILE, metavar="P", help="default: %(default)s")
    spanning.add_argument(
        "--report-dir", type=Path, default=Path("conformance-report"), metavar="DIR", help="one that all hosts share"
    )
    spanning.add_argument("more", nargs="*", metavar="...", help="after --: more arguments of pytest, such as --cells")
    return parser


def _add_diff(commands: Any) -> None:
    comparing = commands.add_parser(
        "diff", help="what is different between two reports; exit status 1 if there is more than improvements"
    )
    comparing.add_argument("before", type=Path, metavar="A", help="the report directory that is the baseline")
    comparing.add_argument("after", type=Path, metavar="B", help="the one that is looked at")
    comparing.add_argument("--any-suite", action="store_true", help="also if they were judged by different suites")
    texts = comparing.add_mutually_exclusive_group()
    texts.add_argument("--json", action="store_true", help="all changes, one by one")
    texts.add_argument("--markdown", action="store_true", help="as markdown, such as for a step summary")
    comparing.add_argument("--html", type=Path, metavar="FILE", help="also as a page")


def _add_defects(commands: Any) -> None:
    trying = commands.add_parser("defects", help="inject every known fault: is each caught by the laws that must?")
    trying.add_argument("id", nargs="*", help="only these (default: all)")
    trying.add_argument("--profile", default=DEFAULT_PROFILE, metavar="P", help="whose cells (default: %(default)s)")
    trying.add_argument("--workers", type=int, default=2, metavar="N", help="processes, each with its own ranks")
    trying.add_argument("--write-docs", action="store_true", help="also write docs/detection/kill_matrix.md")
    trying.add_argument(
        "--report-dir",
        type=Path,
        default=Path("conformance-defects"),
        metavar="DIR",
        help="kill_matrix.json, reused as long as nothing has changed, and kill_matrix.html (default: %(default)s)",
    )


def _add_prediction(commands: Any) -> None:
    predicting = commands.add_parser("predict", help="memory of each rank and bytes on the wire, for any size")
    predicting.add_argument("--model", required=True, help="shapes in conformance/models: llama3-8b, ...")
    predicting.add_argument("--mesh", required=True, help="dp8, dp64-tp8, hsdp16x8, ... up to 4096 in each dimension")
    predicting.add_argument("--precision", default="bf16-mp", help="fp32, bf16-mp, bf16-reduce (default: %(default)s)")
    predicting.add_argument(
        "--reshard", default="default", help='a mode, a number of ranks, or a table: \'{"layers.*": "never"}\''
    )
    predicting.add_argument("--seq-len", type=int, default=8192, help="tokens of a sample (default: %(default)s)")
    predicting.add_argument("--batch", type=int, default=1, help="samples of each rank (default: %(default)s)")
    predicting.add_argument("--accumulation", type=int, default=1, help="micro-batches (default: %(default)s)")
    predicting.add_argument("--offload", default="none", help="none or cpu")
    predicting.add_argument("--activation-checkpointing", default="none", help="none, selective or full")
    predicting.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="another value in the model's shape, such as n_layers=48; can be repeated",
    )
    predicting.add_argument(
        "--simulate",
        action="store_true",
        help="also run two steps of the trainer with FSDP2, in one process and without the memory, and compare",
    )
    predicting.add_argument("--json", action="store_true", help="all figures as JSON, in bytes")
    predicting.add_argument("--picture", type=Path, metavar="FILE", help="also draw the memory of each phase, as SVG")


if __name__ == "__main__":
    sys.exit(main())
