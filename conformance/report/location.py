"""Location of a fault: the first place of a run whose inputs agree with the oracle's and whose output does not."""

from typing import Literal

import msgspec

Family = Literal["tensor", "dtype", "memory", "schedule", "state", "race", "trial"]
"""Kind of a first wrong place: a tensor's numbers or dtype, memory, an order of collectives, a state, a race of
streams, or a trial, which is a call of a sweep or another of a law's own metrics."""
Stage = Literal[
    "initial values",
    "resumed state",
    "data",
    "parameters",
    "forward",
    "loss",
    "backward",
    "reduction",
    "clipping",
    "optimizer",
    "memory",
    "schedule",
    "trial",
]
"""Stage of a run, in the order of execution. `parameters` are those that a module computes with, as gathered."""
Mark = Literal["right", "wrong", "follows", "unseen"]
"""State of a module: `follows` if it differs from the oracle after the first wrong place."""


class Code(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Line of source."""

    file: str
    """Path below the directory of its package, `torch/distributed/...`, or the path of a file of no package."""
    line: int
    function: str

    def __str__(self) -> str:
        """Return `file:line (function)`."""
        return f"{self.file}:{self.line} ({self.function})"


class Location(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First wrong place of the cell of a failed case, from one further run with taps."""

    case: str
    """Id of the failed case."""
    cell: str
    """Id of the cell that was run with taps."""
    family: Family
    stage: Stage
    name: str
    """Path of the module, parameter or buffer; of a group of parameters the path of its module; empty for the run."""
    quantity: str
    """Quantity of the module, parameter or rank that is wrong: `output`, `gradient of its input`, `gradient`."""
    step: int | None = None
    micro_batch: int | None = None
    ranks: list[int]
    """Ranks whose value is wrong."""
    ranks_text: str
    """Same ranks by their places in the mesh: `tp rank 1 of 2`, `all ranks`."""
    module_class: str = ""
    equals: str = ""
    """Clause about the wrong value: `0.5 x expected = 1/tp`, `the value of rank 0`, `not initialised (NaN)`."""
    agrees: str = ""
    """Clause about the inputs of the place: `its inputs agree to 3e-7`."""
    collective: str = ""
    """Clause about the collective between inputs and output: `all_reduce over tp between them: not issued`."""
    elements: str = ""
    """Clause about the wrong elements: `rows 4 to 7, the shard of rank 1`; empty if all are wrong."""
    called: Code | None = None
    """Line of the trainer, or of torch, that calls the wrong place."""
    issued: Code | None = None
    """Line that issues the wrong collective."""
    tree: dict[str, Mark] = {}
    """State of each module by path, in the order of the model."""
    seconds: float = 0.0
    """Duration of the run with taps and of its comparison."""

    @property
    def place(self) -> str:
        """Stage, name and quantity: `backward: layers.1.attention.wo, gradient of its input`."""
        return f"{self.stage}: {', '.join(filter(None, (self.name, self.quantity)))}"

    @property
    def sentence(self) -> str:
        """Location in one line, which begins with the stage and the place."""
        when = "".join(
            f", {word} {number}"
            for word, number in (("step", self.step), ("micro-batch", self.micro_batch))
            if number is not None
        )
        clauses = [f"first wrong: {self.place} on {self.ranks_text}{when}"]
        clauses += [clause for clause in (self.equals, self.elements, self.agrees, self.collective) if clause]
        clauses += [f"called at {self.called}"] if self.called else []
        clauses += [f"issued at {self.issued}"] if self.issued and self.issued != self.called else []
        return "; ".join(clauses)
