"""Published runs beside their predictions."""

from collections.abc import Iterator, Sequence
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
out. With tensor or context parallelism a model with latent attention is refused.

## Attention in a ring

With `dp64-cp8`, eight consecutive ranks share `--batch` samples. torch's ring gathers the keys and values of all ranks
at once, and adds up in fp32; the rank that needs most counts.

## Experts

Experts are stacked. With a mesh such as `dp64-ep8`, eight consecutive ranks divide those of a block among them; the
ranks with the same ones shard them, as an FSDP group of their own along the first dimension, and all other parameters
are sharded over all ranks. Without `ep` a block gathers all of its experts. A rank sends each row to its experts and
back, in forward and in backward, and with full checkpointing twice in backward, in the dtype of computation:
all-to-alls of `ep` in the table of collectives. Tokens are spread evenly; the busiest rank of a real router needs more.
With `tp` each rank has a part of every expert, and exchanges the rows of all tokens.

## Activations

`--activation-checkpointing` is one of {checkpointing}. `selective` keeps the outputs of all matrix products and of
attention, `selective-op` of every second product, as torchtitan's option of that name does. `--logits` says what the
loop does with the model's output: one that is held in fp32 through backward costs four bytes for each token and word of
the vocabulary, one that is deleted nothing.

## Fixed costs of a CUDA device

A table beside the prediction has a range for each: context, NCCL, workspaces of cuBLAS, and the temporaries of an
optimizer that steps all parameters at once. They are reports of others, with their sources; none was verified on a GPU.
`--device-memory` counts the upper ends. `--fixed-costs SIZE` puts your own figure in their place: what `nvidia-smi`
shows of the process less `torch.cuda.max_memory_reserved()`.

## Published runs

Each row is a run that others have published, and the peak that is predicted for the nearest request. None was repeated
here. A prediction counts active memory, so that a figure that is *active* can be compared. One that is *reserved* has
the allocator's *cache* as well, blocks that are free and fit no request: each stream of FSDP2 has a pool of its own
(pytorch/pytorch#129721). {caches}"""
_DIFFERENCES = """## Differences between runs

Between two runs that differ in one setting the cache cancels, if blocks keep their sizes. With more ranks the part of
it that the gradients of the step before have left is smaller, too: it is not predicted."""
_REQUESTS = "## Requests, by number"
_COMMAND = "conformance predict"


class Published(Config, frozen=True, kw_only=True):
    """Run with its published peak memory of a rank."""

    run: str
    source: str
    published_gib: float
    counted: Literal["active", "reserved"]
    """Memory of PyTorch's caching allocator that `published_gib` is."""
    reserved_gib: float | None = None
    """Reserved memory, where the authors publish it beside active memory."""
    request: Request
    than: int | None = None
    """Number of a run from which this one differs in one setting."""
    why: str
    """Reason of the difference; `cache` is explained above the table."""


class _File(Config, frozen=True, kw_only=True):
    schema: Literal[1]
    runs: tuple[Published, ...]


def read_published(file: Path = _FILE) -> tuple[Published, ...]:
    """Return the published runs. Raises ConfigError for a file with a mistake."""
    return convert(load(file), _File).runs


def published_markdown(runs: Sequence[Published]) -> str:
    """Return docs/predict.md."""
    predicted = [peak_bytes(prediction(run.request).phases) / _GIB for run in runs]
    rows = [_row(number, run, gib) for number, (run, gib) in enumerate(zip(runs, predicted, strict=True), start=1)]
    headers = ["", "run", "published (GiB)", "counted", "predicted (GiB)", "difference (GiB)", "difference", "why"]
    introduction = _INTRODUCTION.format(
        architectures=", ".join(f"`{name}`" for name in ARCHITECTURES),
        checkpointing=", ".join(f"`{name}`" for name in KEPT),
        caches=_caches(runs),
    )
    commands = (f"{number:2} {_COMMAND} {_options(run.request)}" for number, run in enumerate(runs, start=1))
    return "\n\n".join(
        [
            *_wrapped(introduction),
            tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True),
            *_wrapped(_DIFFERENCES),
            _differences(runs, predicted),
            _REQUESTS,
            "\n".join(["```", *commands, "```\n"]),
        ]
    )


def _wrapped(text: str) -> Iterator[str]:
    return (fill(" ".join(paragraph.split("\n")), width=120) for paragraph in text.split("\n\n"))


def _caches(runs: Sequence[Published]) -> str:
    """Return a sentence about the runs whose authors publish active and reserved memory."""
    caches = {number: run.reserved_gib - run.published_gib for number, run in enumerate(runs, 1) if run.reserved_gib}
    numbers, sizes = " and ".join(map(str, caches)), " and ".join(f"{cache:.1f}" for cache in caches.values())
    return f"In runs {numbers}, whose authors publish both, it has {sizes} GiB."


def _row(number: int, run: Published, predicted: float) -> list[str]:
    difference = predicted - run.published_gib
    return [
        str(number),
        f"[{run.run}]({run.source})",
        f"{run.published_gib:.2f}",
        run.counted,
        f"{predicted:.2f}",
        f"{difference:+.2f}",
        f"{difference / run.published_gib:+.1%}",
        run.why,
    ]


def _differences(runs: Sequence[Published], predicted: Sequence[float]) -> str:
    rows = []
    for number, run in enumerate(runs):
        if run.than:
            published = run.published_gib - runs[run.than - 1].published_gib
            gib = predicted[number] - predicted[run.than - 1]
            rows.append([f"{number + 1} less {run.than}", f"{published:+.2f}", f"{gib:+.2f}"])
    headers = ["runs", "published (GiB)", "predicted (GiB)"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _options(request: Request) -> str:
    """Return the options of `conformance predict` that differ from their defaults."""
    given = msgspec.structs.asdict(request)
    defaults = msgspec.structs.asdict(Request(model="", mesh=""))
    changed = {name.replace("_", "-"): value for name, value in given.items() if value != defaults[name]}
    return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in changed.items())
