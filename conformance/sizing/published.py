"""Published runs beside their predictions."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Literal

import msgspec
from tabulate import tabulate

from conformance.sizing.activations import KEPT
from conformance.sizing.huggingface import ARCHITECTURES
from conformance.sizing.prediction import Request, peak_bytes, prediction
from reference_trainer.checks import Config
from reference_trainer.strict_yaml import convert, load

_FILE = Path(__file__).with_name("published.yaml")
_GIB = 2**30
_INTRODUCTION = """# Predicted and published memory

Written by `python -m conformance docs --write` from conformance/sizing.

## Models

`conformance predict --model` takes a name, a .yaml, or a config.json of Hugging Face whose architecture is one of
{architectures}; each has as many parameters as the class of transformers. Any other is refused, as are quantized
weights that were never trained otherwise. Encoders of images, and layers that predict further tokens, are named as left
out. Experts are sharded by FSDP alone, stacked, along their first dimension; with tensor parallelism a model with
experts or latent attention is refused.

## Activations

`--activation-checkpointing` is one of {checkpointing}. `selective` keeps the outputs of all matrix products and of
attention, `selective-op` of every second product, as torchtitan's option of that name does.

## Fixed costs of a CUDA device

A table beside the prediction has a range for each: context, NCCL, workspaces of cuBLAS, and the temporaries of an
optimizer that steps all parameters at once. They are reports of others, with their sources; none was verified on a GPU.
`--device-memory` counts the upper ends. `--fixed-costs SIZE` puts your own figure in their place: what `nvidia-smi`
shows of the process less `torch.cuda.max_memory_reserved()`.

## Published runs

Each row is a run that others have published, and the peak that is predicted for the nearest request. A prediction
counts active memory. A published figure that is *reserved* has the allocator's cache and fragments as well, so that it
bounds the prediction from above; one that is *active* can be compared. None of these runs was repeated here."""


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
    introduction = _INTRODUCTION.format(
        architectures=", ".join(f"`{name}`" for name in ARCHITECTURES),
        checkpointing=", ".join(f"`{name}`" for name in KEPT),
    )
    paragraphs = (fill(" ".join(each.split("\n")), width=120) for each in introduction.split("\n\n"))
    return "\n\n".join([*paragraphs, table]) + "\n"


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
