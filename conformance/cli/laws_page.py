"""docs/laws.md, written by `python -m conformance laws --write-docs`."""

from tabulate import tabulate

from conformance.cli.describe import asserted_laws
from conformance.defects.catalogue import defects
from conformance.judge.law import in_order
from conformance.project import PROJECT

PAGE = PROJECT / "docs" / "laws.md"
_INTRODUCTION = """# Laws

Written by `python -m conformance laws --write-docs`; a test keeps it in step with the laws. `python -m conformance
show LAW` adds families and numbers of cases. A law holds from the torch version on that stands there, on each of its
substrates; those with devices are unverified where [gpu/status.md](gpu/status.md) says so. The defects are those that
the law must catch, see [detection/kill_matrix.md](detection/kill_matrix.md)."""


def laws_page() -> str:
    """All laws: what MUST hold, where torch says so, from which version on, on what, and what proves it."""
    rows = []
    for law_id, asserted in sorted(asserted_laws().items(), key=lambda item: in_order(item[0])):
        law = asserted.law
        proofs = ", ".join(defect.id for defect in defects() if law_id in defect.laws)
        must = law.must.replace("|", "\\|")
        rows.append([law_id, must, f"[source]({law.reference})", law.since, ", ".join(law.substrates), proofs or "-"])
    headers = ["law", "MUST", "reference", "torch", "substrates", "defects"]
    return f"{_INTRODUCTION}\n\n{tabulate(rows, headers=headers, tablefmt='github', disable_numparse=True)}\n"
