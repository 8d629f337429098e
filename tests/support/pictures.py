"""Pictures of docs/: `python -m tests.support.pictures PASSING FAILING`, which are directories of reports.

Such reports are those of `pytest -n auto conformance/ --profile smoke --report-dir PASSING`, and of the same with
`--defect grads-summed --report-dir FAILING`. Needed besides Chromium: pngquant, which makes a third of a file.
"""

import argparse
import subprocess
from pathlib import Path

from conformance.project import PROJECT
from tests.support.browser import chrome

WIDE, NARROW = (1000, 640), (400, 860)
"""Widths, and heights at which a window ends above commands, which name directories of the machine."""


def main() -> None:
    """Write the pictures of a passing report, of a failing one, and of the failing one on a phone in the dark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("passing", type=Path)
    parser.add_argument("failing", type=Path)
    options = parser.parse_args()
    pictures = {
        "report": (options.passing, WIDE, False),
        "report_failed": (options.failing, WIDE, False),
        "report_failed_on_a_phone": (options.failing, NARROW, True),
    }
    with chrome() as window:
        for name, (directory, (width, height), dark) in pictures.items():
            window.open(directory.resolve() / "report.html", width=width, height=height, dark=dark)
            small = ["pngquant", "--strip", "128", "-"]
            picture = subprocess.run(small, input=window.screenshot(), stdout=subprocess.PIPE, check=True).stdout
            (PROJECT / "docs" / f"{name}.png").write_bytes(picture)


if __name__ == "__main__":
    main()
