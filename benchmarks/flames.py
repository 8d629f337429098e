"""Flame graph of a session as text: `python -m benchmarks.flames SESSION STACKS [--write]`.

STACKS is a file of py-spy, which is a tool of the user, written while a session ran:

    py-spy record --subprocesses --rate 6 --nonblocking --format raw -o STACKS -- pytest -n auto conformance/ ...

SESSION names the session: `smoke` or `pr`. For ranks, workers, rank servers and the controller there is a tree of
functions with their share of the samples, in which a function that does nearly all that its caller does stands on the
line of the latter. `--write` writes the page of the session, `flames_SESSION.md`.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conformance.project import PROJECT

DIRECTORY = PROJECT / "docs"
PAGE = """# Flame graph of `{session}`

Written by `python -m benchmarks.flames {session} STACKS --write`: shares of the samples of each kind of process, by
function. A function below {least:.0%} is left out; after dots stands the last of functions that do the same work.

```text
{trees}
```
"""
LEAST_SHARE = 0.02
"""Share of a process's samples below which a function is left out."""
SAME_SHARE = 0.95
"""Share of its caller's samples from which on a function stands on the line of the latter."""
_LINE = re.compile(r":\d+\)$")
_FOREIGN = re.compile(r"\(.*/(?:site-packages|python3\.\d+)/")
_BOILERPLATE = re.compile(
    r"\((?:_pytest|pluggy|xdist|execnet|importlib)/|\(<(?:frozen|string)|^<module>|^_wrapped_call"
)
"""Frames of pytest, of its plugins and of imports."""


@dataclass
class Node:
    """Function in a tree of calls, with the samples in which it was on the stack below its callers."""

    samples: int = 0
    callees: "dict[str, Node]" = field(default_factory=dict)

    def add(self, frames: Iterable[str], samples: int) -> None:
        """Add samples of one stack, outermost frame first."""
        node = self
        node.samples += samples
        for frame in frames:
            node = node.callees.setdefault(frame, Node())
            node.samples += samples

    def lines(self, *, total: int, depth: int = 0) -> Iterator[str]:
        """Yield a line for each callee with a share of at least `LEAST_SHARE`, the largest first."""
        for name, callee in sorted(self.callees.items(), key=lambda item: -item[1].samples):
            if callee.samples < LEAST_SHARE * total:
                return
            names, last = [name], callee
            while (heavy := last.heaviest()) and heavy[1].samples >= SAME_SHARE * last.samples:
                names.append(heavy[0])
                last = heavy[1]
            label = " ... ".join(dict.fromkeys((names[0], names[-1])))
            yield f"{'  ' * depth}{callee.samples / total:4.0%} {label}"
            yield from last.lines(total=total, depth=depth + 1)

    def heaviest(self) -> "tuple[str, Node] | None":
        """Return the callee with most samples."""
        return max(self.callees.items(), key=lambda item: item[1].samples, default=None)


def kind_of_process(frames: list[str]) -> str:
    """Return the kind of process that a stack belongs to."""
    text = "\n".join(frames)
    if "run/ranks/process.py" in text:
        return "rank"
    if "conformance.run.ranks" in text or "run/ranks/server.py" in text:
        return "rank server"
    return "worker" if "execnet/" in text else "controller" if "_pytest/" in text else "other"


def frames_of(stack: str) -> list[str]:
    """Return the frames of a raw stack in the process that it ends in, without line numbers and machine paths."""
    frames: list[str] = []
    for frame in re.split(r';(?=(?:[^"]*"[^"]*")*[^"]*$)', stack):  # commands of processes, quoted, have semicolons
        if frame.startswith("process "):
            frames = []
        else:
            frames.append(_FOREIGN.sub("(", _LINE.sub(")", frame)))
    return frames


def trees(stacks: Iterable[str]) -> dict[str, Node]:
    """Return the tree of each kind of process."""
    roots: dict[str, Node] = {}
    for line in stacks:
        stack, _, samples = line.rpartition(" ")
        frames = frames_of(stack)
        shown = [frame for frame in frames if not _BOILERPLATE.search(frame)]
        roots.setdefault(kind_of_process(frames), Node()).add(shown, int(samples))
    return roots


def text_of(roots: dict[str, Node]) -> str:
    """Return all trees, that of the process with most samples first."""
    counts = Counter({kind: root.samples for kind, root in roots.items()})
    blocks = []
    for kind, samples in counts.most_common():
        if samples >= LEAST_SHARE * counts.total():
            tree = "\n".join(roots[kind].lines(total=samples))
            blocks.append(f"{kind}: {samples / counts.total():.0%} of {counts.total()} samples\n{tree}")
    return "\n\n".join(blocks)


def main() -> None:
    """Print the trees of a session, and write its page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", help="smoke or pr")
    parser.add_argument("stacks", type=Path, help="raw stacks of py-spy")
    parser.add_argument("--write", action="store_true", help="write the page of the session")
    options = parser.parse_args()
    text = text_of(trees(options.stacks.read_text().splitlines()))
    print(text)
    if options.write:
        page = PAGE.format(session=options.session, least=LEAST_SHARE, trees=text)
        (DIRECTORY / f"flames_{options.session}.md").write_text(page)


if __name__ == "__main__":
    main()
