"""Sizes of the model to predict: by name, from a YAML file, or from a `config.json` of Hugging Face."""

from collections.abc import Sequence
from pathlib import Path

from conformance.sizing.decoder import Decoder
from conformance.sizing.huggingface import decoder_sizes
from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import Document, convert, load, override

MODELS = Path(__file__).parent / "models"
_REQUIRED = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")
"""Sizes for which a default would be a guess."""


def model_names() -> list[str]:
    """Return the names of the models whose shapes are shipped."""
    return sorted(file.name.removesuffix(".yaml") for file in MODELS.glob("*.yaml"))


def read_model(model: str, overrides: Sequence[str]) -> Decoder:
    """Return the sizes of a model: a name, or the path of a `.yaml` or `config.json` file, with overrides.

    Raises UsageError for any other text, and for sizes that are incomplete or contradict each other.
    """
    document = override(_document(model), overrides)
    missing = [name for name in _REQUIRED if name not in document.data]
    if missing:
        raise document.error("$", f"{', '.join(missing)} missing: write a line such as `{missing[0]}: NUMBER`")
    return convert(document, Decoder)


def _document(model: str) -> Document:
    if model in model_names():
        return load(MODELS / f"{model}.yaml")
    path = Path(model)
    match path.suffix:
        case ".yaml" | ".yml":
            return load(path)
        case ".json":
            return decoder_sizes(load(path))  # JSON is YAML
    raise UsageError(
        f"unknown model {model}: choose from {', '.join(model_names())}, or give the path of a .yaml like those in "
        "conformance/sizing/models, or of a config.json of Hugging Face"
    )
