"""`python -m conformance laws`: all laws as markdown; conformance/laws/README.md has their statements by chapter."""

import argparse
import importlib

from tabulate import tabulate

from conformance.cli.command import Answer, Commands
from conformance.defects.catalogue import defects
from conformance.judge.registry import asserted_laws
from conformance.localisation.families import table_of_places
from conformance.plan.scopes import GAPS, in_order

_INTRODUCTION = """# Laws

A law is judged on all cells of a session that are *where* it holds, except for the gaps below the table, from this
version of torch on and on these substrates; docs/gpu.md says which of them have run. It must catch these defects:
docs/kill_matrix.md. `python -m conformance show LAW` adds numbers of cases."""

_SPECIFICATION = """# The specification

Written by `python -m conformance docs --write`. What FSDP2 and tensor parallelism MUST do, by chapter, which is a
folder here. `python -m conformance laws` adds where each law holds, since which torch, its gaps and its defects."""

_GAPS = """## Gaps

Cells of which the MUST of a law speaks and which the law cannot judge yet. `python -m conformance coverage` counts
them for a profile."""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("laws", help="all laws with their references and defects, as markdown")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Answer:
    """Print the laws."""
    return Answer(laws_markdown())


def laws_markdown() -> str:
    """Return a table of laws: MUST, reference, first torch version, substrates, and defects.

    The proof that a law can fail are the defects that it must catch.
    """
    rows = []
    for law_id, asserted in sorted(asserted_laws().items(), key=lambda item: in_order(item[0])):
        law = asserted.law
        proofs = ", ".join(defect.id for defect in defects() if law_id in defect.laws)
        must = law.must.replace("|", "\\|")
        substrates = ", ".join(law.substrates)
        rows.append(
            [law_id, must, law.scope.where.text, f"[source]({law.reference})", law.since, substrates, proofs or "-"]
        )
    headers = ["law", "MUST", "where", "reference", "torch", "substrates", "defects"]
    laws = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    return f"{_INTRODUCTION}\n\n{laws}\n\n{_GAPS}\n\n{_gaps()}"


_PLACES = "The place that a failure of each law is told, or of each family of laws, and the searches that find it."


def specification_markdown() -> str:
    """Return the laws by chapter, a folder of `conformance/laws`: id, MUST and reference; and where failures are."""
    chapters: dict[str, list[list[str]]] = {}
    for law_id, asserted in sorted(asserted_laws().items(), key=lambda item: in_order(item[0])):
        package = asserted.test.__module__.rpartition(".")[0]
        must = asserted.law.must.replace("|", "\\|")
        chapters.setdefault(package, []).append([law_id, must, f"[source]({asserted.law.reference})"])
    text = [_SPECIFICATION]
    for package, rows in chapters.items():
        about = " ".join(str(importlib.import_module(package).__doc__).split())
        table = tabulate(rows, headers=["law", "MUST", "reference"], tablefmt="github", disable_numparse=True)
        text.append(f"## {package.rpartition('.')[2]}\n\n{about}\n\n{table}")
    text.append(f"## Places of failures\n\n{_PLACES}\n\n{table_of_places()}")
    return "\n\n".join(text)


def _gaps() -> str:
    """Return a table of the gaps between laws and their MUST, with the reasons and the laws."""
    laws = {law_id: asserted.law for law_id, asserted in asserted_laws().items()}
    rows = [
        [gap.cells, gap.reason, ", ".join(law for law in sorted(laws, key=in_order) if gap in laws[law].scope.gaps)]
        for gap in GAPS.values()
    ]
    return tabulate(rows, headers=["cells", "reason", "laws"], tablefmt="github", disable_numparse=True)
