"""Places of the defects: the rows of places.yaml, against which explanations of failures are judged.

The rows were written from the code of the faults, before an explanation of any of them existed.
"""

import re
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from reference_trainer.strict_yaml import convert, load

FILE = Path(__file__).with_name("places.yaml")

Where = Literal["sweep", "memory", "schedule", "race"]
"""Kind of a place that is no wrong tensor of a cell's run.

A case of a sweep or an experiment, memory, the order or number of operators, or operators that nothing orders.
"""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Place that a correct explanation of a defect names: `stages` and `name` of a tensor, or `where` and `text`."""

    cell: str = ""
    """Id of the cell on which the explanation is judged; empty if the defect's selection has one cell only."""
    stages: tuple[str, ...] = ()
    """Acceptable values of `conformance.report.location.Stage`."""
    name: str | None = None
    """Regular expression of the whole path of the module, parameter, buffer or group; empty for the run."""
    quantity: str = ""
    """Regular expression that occurs in the wrong quantity; empty if any is right."""
    collective: str = ""
    """Regular expression that occurs in the clause about the collective, such as `all_reduce over tp`."""
    ranks: tuple[int, ...] = ()
    """All ranks whose value is wrong; empty if they are not judged."""
    where: Where | None = None
    text: str = ""
    """Regular expression that occurs in the explanation.

    Of memory and schedule that is the sentence of the location, of a sweep or a race the reason of the failed law.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for a row that is neither or both of the two kinds, and for a wrong expression."""
        tensor, other = (bool(self.stages), self.name is not None), (self.where is not None, bool(self.text))
        if not any(all(own) and not any(others) for own, others in ((tensor, other), (other, tensor))):
            raise ValueError("a place has either `stages` and `name`, or `where` and `text`")
        if self.where and (self.quantity or self.collective or self.ranks):
            raise ValueError("`quantity`, `collective` and `ranks` are those of a tensor, not of `where`")
        for expression in (self.name or "", self.quantity, self.collective, self.text):
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(f"`{expression}` is no regular expression: {error}") from error


@cache
def places(file: Path = FILE) -> dict[str, Place]:
    """Return the places by id of the defect, without torch. Raises ConfigError for a row that is not as documented."""
    return convert(load(file), dict[str, Place])
