"""Families of laws, and the place that a failure of each is told: `where_of`.

A failure is located by the first of a family's searches that finds a place, see `localise.explained`.
`table_of_places` shows all of them.
"""

from typing import Literal, NamedTuple

Search = Literal["tensors", "order", "memory", "dtypes", "race", "delays", "finding"]
"""Way in which a place is looked for.

`tensors`: the first wrong tensor or state of a run with taps. `order`: its first collective, action of a pipeline or
recomputed forward pass that is out of place. `memory`: the storages that are held. `dtypes`: the dtypes of its record.
`race` and `delays`: results of the law's own runs. `finding`: the law's own metrics and reason.
"""


class Where(NamedTuple):
    """Place that a failure of a law has."""

    searches: tuple[Search, ...]
    """Searches in their order."""
    place: str
    """Noun phrase for the place, of plain words."""


_TENSOR = Where(
    ("tensors", "order", "finding"),
    "first wrong tensor: module or parameter, step, micro-batch, ranks, and the collective before it",
)
_STATE = Where(
    ("tensors", "finding"),
    "first wrong entry of the state: parameter, buffer or kind of optimizer state, the step since when, and ranks",
)
_SCHEDULE = Where(
    ("order", "tensors", "finding"),
    "first collective that is missing, superfluous, in another order, or of another size or dtype: its group or "
    "module, the line that issued it, and ranks; else the group that is unsharded when it should not be",
)
_PIPELINE = Where(
    ("order", "tensors", "memory", "finding"),
    "first action that is not the schedule's: stage and micro-batch; else the first collective out of place",
)
_MEMORY = Where(
    ("memory", "order", "finding"),
    "storages that are held and should not be: group or module, bytes, moment, and the line that allocated them",
)
_FSDP_MEMORY = Where(
    ("order", "memory", "finding"),
    f"first collective out of place, or group that is unsharded, from which the memory follows; else {_MEMORY.place}",
)
_DTYPE = Where(
    ("tensors", "dtypes", "order", "finding"),
    "first tensor of another dtype: parameter, module, gradient, optimizer state or buffer, and ranks",
)
_WIRE = Where(("order", "tensors", "dtypes", "finding"), "first collective in another dtype, else first tensor")
_RACE = Where(
    ("race", "delays", "tensors", "finding"),
    "pair of operators on two streams that no event orders, each with the line that issued it; else the first tensor "
    "that changes when operators are delayed",
)
_TRIAL = Where(("finding",), "subject of the sweep (option, operator, or module and layout), and the trial")
_MACHINE = Where(("finding",), "metric of the machine or of torch's installation")
_DEVICE = Where(
    ("tensors", "finding"),
    "first wrong tensor under the session's schedule; else the law's own finding: two operators with the lines that "
    "issued them, the schedule and the tensors that it changes, or rank, phase and bytes",
)

_FAMILIES: dict[str, Where] = {
    "AC": _SCHEDULE,
    "AMP": _TENSOR,
    "API": _TRIAL,
    "AXIS": Where(
        ("order", "tensors", "memory", "finding"),
        "first collective, action or recomputed forward pass that the axis should have changed; else the axis",
    ),
    "CKPT": _STATE,
    "CLIP": _TENSOR,
    "CP": _TRIAL,
    "DATA": _TENSOR,
    "DT": _TRIAL,
    "ENV": _MACHINE,
    "EP": _TRIAL,
    "INIT": _STATE,
    "LIFE": _TRIAL,
    "LOUD": _TRIAL,
    "MEM": _FSDP_MEMORY,
    "MESH": _TRIAL,
    "MP": _DTYPE,
    "OFF": _STATE,
    "OPT": _STATE,
    "PAR": _TENSOR,
    "PP": _PIPELINE,
    "RS": _SCHEDULE,
    "STREAM": _MEMORY,
    "TP": _TRIAL,
}
_LAWS: dict[str, Where] = {
    "CKPT-4": _TRIAL,
    "CKPT-5": _TRIAL,
    **{f"CKPT-{number}": _TRIAL for number in range(6, 11)},
    "AMP-4": _TRIAL,
    "CLIP-3": _TRIAL,
    "CLIP-4": _TRIAL,
    "CLIP-5": _SCHEDULE,
    "CLIP-6": _TRIAL,
    "CLIP-7": _TRIAL,
    "CLIP-8": _TRIAL,
    "EP-2": _TENSOR,
    "EP-4": _SCHEDULE,
    "INIT-5": _TRIAL,
    "INIT-6": _MEMORY,
    "MEM-2": _MEMORY,
    "MEM-6": _MEMORY,
    "MEM-8": _MEMORY,
    "INIT-8": _TRIAL,
    "MP-1": _WIRE,
    "MP-4": _SCHEDULE,
    "MP-6": _TRIAL,
    "OFF-3": _TRIAL,
    "OPT-3": _TRIAL,
    "OPT-4": _TRIAL,
    "OPT-5": _TRIAL,
    "PP-2": Where(("order", "memory", "finding"), "stage and micro-batch whose activations are held, and the action"),
    "PP-5": _TENSOR,
    "STREAM-3": _TENSOR,
    "STREAM-5": _RACE,
    "STREAM-6": _RACE,
    "STREAM-7": _TRIAL,
    "clipping-reduces-norms": _SCHEDULE,
    "gradients-are-reduced": _SCHEDULE,
    "no-needless-collectives": _SCHEDULE,
    "parameters-are-gathered": _SCHEDULE,
    "resharded": _SCHEDULE,
    "same-collectives": _SCHEDULE,
    "wire-dtypes": _WIRE,
    "bf16-gradients": _DTYPE,
    "bf16-is-used": _DTYPE,
    "bf16-parameters": _DTYPE,
    "fp32-masters": _DTYPE,
}
"""Laws whose place is another one than that of their family."""
_ANY_TRAINER: dict[str, Where] = dict.fromkeys(
    (
        "fsdp-is-on",
        "tensor-parallelism-is-on",
        "partition",
        "replicas",
        "initialised",
        "initial-weights",
        "tied-weights",
        "optimizer-holds-each-once",
        "every-update",
    ),
    _STATE,
) | dict.fromkeys(("every-gradient", "gradients", "parameters", "loss", "gradient-norm", "clipping"), _TENSOR)
_ANY_TRAINER |= dict.fromkeys(
    (
        "unordered-accesses",
        "schedules-agree",
        "memory-held",
        "memory-by-phase",
        "memory-of-steps",
        "memory-of-streams",
    ),
    _DEVICE,
)
"""Laws of any trainer, which have names in place of families."""


def where_of(law: str) -> Where:
    """Return the place of a law's failures. Raises KeyError for a law of which none is known.

    >>> where_of("MEM-6").searches
    ('memory', 'order', 'finding')
    """
    if law in _LAWS or law in _ANY_TRAINER:
        return (_LAWS | _ANY_TRAINER)[law]
    return _FAMILIES[law.rpartition("-")[0]]


def table_of_places() -> str:
    """Return a table in Markdown: laws, searches in their order, and the place that is told."""
    rows: dict[Where, list[str]] = {}
    for names in (_FAMILIES, _LAWS, _ANY_TRAINER):
        for name, where in names.items():
            rows.setdefault(where, []).append(name)
    lines = [f"| {', '.join(names)} | {', '.join(where.searches)} | {where.place} |" for where, names in rows.items()]
    return "\n".join(["| Laws | Searches | Place |", "| --- | --- | --- |", *lines])
