"""Published runs beside their predictions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from tabulate import tabulate

from conformance.sizing.prediction import Request, peak_bytes, prediction
from reference_trainer.checks import Config
from reference_trainer.strict_yaml import convert, load

_FILE = Path(__file__).with_name("published.yaml")
_GIB = 2**30
_INTRODUCTION = """# Predicted and published memory

Written by `python -m conformance docs --write` from conformance/sizing/published.yaml. Each row is a run that others
have published, and the peak that `conformance predict` gives for the nearest request. A prediction counts active
memory. A published figure that is *reserved* has the allocator's cache and fragments as well, and says little about a
difference of a few per cent; one that is *active* can be compared. None of these runs was repeated here."""


class Published(Config, frozen=True, kw_only=True):
    """Run with its published peak memory of a rank."""

    run: str
    source: str
    published_gib: float
    counted: Literal["active", "reserved"]
    """Memory of PyTorch's caching allocator that was published."""
    request: Request
    differs: str
    """Differences between the run and the request, or the reason of the difference."""


class _File(Config, frozen=True, kw_only=True):
    schema: Literal[1]
    runs: tuple[Published, ...]


def read_published(file: Path = _FILE) -> tuple[Published, ...]:
    """Return the published runs. Raises ConfigError for a file with a mistake."""
    return convert(load(file), _File).runs


def published_markdown(runs: Sequence[Published]) -> str:
    """Return docs/predict.md."""
    headers = [
        "run",
        "published (GiB)",
        "counted",
        "predicted (GiB)",
        "difference (GiB)",
        "difference",
        "differs",
        "request",
    ]
    table = tabulate([_row(run) for run in runs], headers=headers, tablefmt="github", disable_numparse=True)
    return f"{_INTRODUCTION}\n\n{table}\n"


def _row(run: Published) -> list[str]:
    predicted = peak_bytes(prediction(run.request).phases) / _GIB
    difference = predicted - run.published_gib
    return [
        f"[{run.run}]({run.source})",
        f"{run.published_gib:.2f}",
        run.counted,
        f"{predicted:.2f}",
        f"{difference:+.2f}",
        f"{difference / run.published_gib:+.1%}",
        run.differs,
        f"`{_options(run.request)}`",
    ]


def _options(request: Request) -> str:
    """Return the options of `conformance predict` that differ from their defaults."""
    given = msgspec.structs.asdict(request)
    defaults = msgspec.structs.asdict(Request(model="", mesh=""))
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value != defaults[name])
