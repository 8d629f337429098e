"""Pictures of docs/: `python -m tests.support.pictures PASSING FAILING STOPPED SITE`.

The first three are directories of reports: those of `pytest -n auto conformance/ --profile smoke --report-dir PASSING`,
of the same with `--defect grads-summed`, and with `-x` besides. SITE is what `conformance site` wrote. With `--every
DIR` each of the four goes into DIR instead, at both widths, light and dark. Needed besides Chromium: pngquant, which
makes a third of a file.
"""

import argparse
import subprocess
from itertools import product
from pathlib import Path
from typing import NamedTuple

from conformance.project import PROJECT
from tests.support.browser import chrome

WIDE, NARROW = (1000, 640), (400, 860)
"""Widths, and heights at which a window ends above commands, which name directories of the machine."""
EVERY_WIDTH = ((1400, 900), (400, 900))


class Picture(NamedTuple):
    """Window with a page, and the file that shows it."""

    page: Path
    size: tuple[int, int]
    dark: bool
    file: Path


def main() -> None:
    """Write the pictures of docs/, or of every page in every window."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("passing", "failing", "stopped", "site"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--every", type=Path, metavar="DIR")
    options = parser.parse_args()
    pages = {name: getattr(options, name).resolve() / "report.html" for name in ("passing", "failing", "stopped")}
    pages["site"] = options.site.resolve() / "index.html"
    with chrome() as window:
        for page, (width, height), dark, file in every(pages, options.every) if options.every else documented(pages):
            window.open(page, width=width, height=height, dark=dark)
            small = ["pngquant", "--strip", "128", "-"]
            picture = subprocess.run(small, input=window.screenshot(), stdout=subprocess.PIPE, check=True).stdout
            file.write_bytes(picture)


def documented(pages: dict[str, Path]) -> list[Picture]:
    """Return the pictures that README and docs/report.md show."""
    docs = PROJECT / "docs"
    return [
        Picture(pages["passing"], WIDE, False, docs / "report.png"),
        Picture(pages["failing"], WIDE, False, docs / "report_failed.png"),
        Picture(pages["failing"], NARROW, True, docs / "report_failed_on_a_phone.png"),
        Picture(pages["site"], WIDE, False, docs / "site.png"),
    ]


def every(pages: dict[str, Path], directory: Path) -> list[Picture]:
    """Return pictures of all pages at both widths, light and dark."""
    directory.mkdir(parents=True, exist_ok=True)
    return [
        Picture(page, size, dark, directory / f"{name}-{size[0]}-{'dark' if dark else 'light'}.png")
        for (name, page), size, dark in product(pages.items(), EVERY_WIDTH, (False, True))
    ]


if __name__ == "__main__":
    main()
