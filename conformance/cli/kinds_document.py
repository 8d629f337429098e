"""Page on the kinds of models and of training: advice to their owners, the cells that are judged, and a declaration.

The text is that of the examples' docstrings. Which cells an example has, and why it lacks others, its subjects say.
"""

import ast
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from conformance.plan.matrix import TRAINER_CELLS
from conformance.project import PROJECT
from conformance.run.kinds import advice, commands, described, example, kinds

DOCUMENT = PROJECT / "docs" / "kinds.md"
_FILE = "my_subject.py"
_INTRODUCTION = f"""# Kinds of models and of training

Written by `python -m conformance docs --write` from the examples in `conformance/subjects/examples`, each of which
`conformance judge --init --kind KIND` writes into `{_FILE}`. How to judge a trainer, which laws there are, and what a
verdict means: [judge your trainer](judge_your_trainer.md). Cells are named as by `conformance list`.
"""


def as_markdown() -> str:
    """Return the page: a table of contents, and a section for each kind."""
    contents = "\n".join(f"- [{kind}](#{kind}): {described(kind)[0]}" for kind in kinds())
    return "\n".join([_INTRODUCTION, contents, *map(_section, kinds())]) + "\n"


def _section(kind: str) -> str:
    """Return the section of a kind."""
    title, _ = described(kind)
    text = example(kind).replace("FILE:", f"{_FILE}:")
    lines = [f"    conformance judge --init --kind {kind}", *(f"    {command}" for command in commands(text))]
    paragraphs = [f"**{lead}**: {said}" for lead, said in advice(kind).items()]
    return "\n\n".join(
        [
            f"\n## {kind}",
            f"{title}.",
            "\n".join(lines),
            *paragraphs,
            *_cells(kind, text),
            f"```python\n{_declaration(text)}\n```",
        ]
    )


def _declaration(text: str) -> str:
    """Return an example's lines from the first one that declares a subject."""
    makers = ("subject", "own_loop")
    first = next(
        each
        for each in ast.parse(text).body
        if any(isinstance(node, ast.Call) and getattr(node.func, "id", "") in makers for node in ast.walk(each))
    )
    start = min(node.lineno for node in ast.walk(first) if isinstance(node, ast.expr))
    return "\n".join(text.splitlines()[start - 1 :])


def _cells(kind: str, text: str) -> Iterator[str]:
    """Yield the cells of each subject of an example, and those that it lacks, by reason."""
    from conformance.subjects.cells import subject_cell  # loads torch, which only this page needs

    module: Any = ModuleType(kind.replace("-", "_"))
    exec(compile(text, _FILE, "exec"), vars(module))
    for command in commands(text):
        name = command.rpartition(":")[2]
        judged: list[str] = []
        lacking: dict[str, list[str]] = {}
        for cell in TRAINER_CELLS:
            reason = getattr(module, name).unsupported(subject_cell(cell))
            (judged if reason is None else lacking.setdefault(reason, [])).append(f"`{cell.id}`")
        others = "".join(f"; {reason}: {', '.join(cells)}" for reason, cells in lacking.items())
        yield f"**Cells of `{name}`**: {', '.join(judged)}{others}."
