"""Models of `predict`: shipped sizes, YAML files, and files of Hugging Face whose models have as many parameters."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conformance.oracles.tp_schedule import local_shapes
from conformance.sizing.decoder import Decoder
from conformance.sizing.huggingface import ARCHITECTURES
from conformance.sizing.models import MODELS, model_names, read_model
from conformance.sizing.prediction import Request, prediction
from reference_trainer.checks import Config
from reference_trainer.strict_yaml import convert, load

# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def hf_config(tmp_path: Path) -> Callable[..., str]:
    """Write the configuration with changes, of which None takes a key away, and return its path."""

    def write(**changes: Any) -> str:
        file = tmp_path / "config.json"
        file.write_text(json.dumps({k: v for k, v in (LLAMA3_8B | changes).items() if v is not None}, indent=2))
        return str(file)

    return write


def test_every_model_that_is_shipped_is_known() -> None:
    assert model_names() == [
        "codellama-34b",
        "llama2-7b",
        "llama3-70b",
        "llama3-8b",
        "llama3.1-405b",
        "qwen3-14b",
        "qwen3-32b",
    ]


def test_a_yaml_file(tmp_path: Path) -> None:
    file, shipped = tmp_path / "mine.yaml", (MODELS / "llama3-8b.yaml").read_text()
    file.write_text(shipped)
    assert read_model(str(file), ["n_layers=3"]) == read_model("llama3-8b", ["n_layers=3"])
    file.write_text(shipped + "n_experts: 8\n")
    with pytest.raises(ValueError, match=r"mine.yaml:\d+: unknown field `n_experts`; allowed: vocab_size"):
        read_model(str(file), [])


def test_a_config_of_hugging_face(hf_config: Callable[..., str]) -> None:
    assert read_model(hf_config(), []).shapes() == read_model("llama3-8b", []).shapes()
    assert read_model(hf_config(), ["n_layers=3"]).n_layers == 3
    without_groups = read_model(hf_config(num_key_value_heads=None, attention_bias=True), [])
    assert (without_groups.n_kv_heads, without_groups.biases) == (32, ("wq", "wk", "wv", "wo"))
    tied = prediction(Request(model=hf_config(tie_word_embeddings=True), mesh="dp8"))
    assert tied.parameters == prediction(Request(model="llama3-8b", mesh="dp8")).parameters - 128_256 * 4096


class Published(Config, frozen=True, kw_only=True):
    """Sizes in a published config.json."""

    source: str
    confirmed: str
    """Place of the same values: a file of another project, or the defaults of the class in transformers."""
    billions: float
    active: float | None = None
    config: dict[str, Any]


class PublishedConfigs(Config, frozen=True, kw_only=True):
    """Content of configs.yaml."""

    schema: int
    configs: list[Published]


PUBLISHED = convert(load(Path(__file__).with_name("configs.yaml")), PublishedConfigs).configs
NO_ARGUMENTS = ("architectures", "auto_map", "quantization_config")


def rows_and_sizes(shapes: Iterable[tuple[int, ...]]) -> Counter[tuple[int, int]]:
    """Return the rows, which FSDP shards, and the number of elements of each parameter."""
    return Counter((shape[0], math.prod(shape)) for shape in shapes)


def expected_shapes(config: dict[str, Any]) -> Counter[tuple[int, int]]:
    """Build the class of transformers that the settings describe, of an encoder and a decoder the decoder alone."""
    settings = {name: value for name, value in config.get("text_config", config).items() if name not in NO_ARGUMENTS}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[settings["model_type"]](**settings))
    return rows_and_sizes(tuple(parameter.shape) for parameter in model.parameters())


def from_file(config: dict[str, Any], folder: Path) -> Decoder:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return read_model(str(file), [])


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.source.split("/")[4])
def test_as_many_parameters_as_published_and_in_transformers(published: Published, tmp_path: Path) -> None:
    decoder = from_file(published.config, tmp_path)
    assert rows_and_sizes(decoder.shapes().values()) == expected_shapes(published.config)
    assert decoder.parameters / 1e9 == pytest.approx(published.billions, rel=0.01)
    active = published.active or published.billions
    assert decoder.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", [each.source for each in PUBLISHED if each.confirmed == "defaults of transformers"])
def test_values_that_are_the_defaults_of_the_class(name: str) -> None:
    (published,) = (each for each in PUBLISHED if each.source == name)
    text = published.config.get("text_config", published.config)
    class_ = CONFIG_MAPPING[text["model_type"]]()
    assert {key: getattr(class_, key) for key in text if key not in NO_ARGUMENTS} == {
        key: value for key, value in text.items() if key not in NO_ARGUMENTS
    }


def test_every_architecture_is_compared() -> None:
    published = {published.config["architectures"][0] for published in PUBLISHED}
    assert {*published, "Llama4ForCausalLM"} == set(ARCHITECTURES)  # the second in the test of layers with experts


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 10}
SMALL = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen3", {"attention_bias": True, "head_dim": 8}),
        ("Qwen3", {}),
        ("Qwen3Moe", EXPERTS | {"num_experts": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
        ("Mixtral", {"num_local_experts": 3, "head_dim": 10}),
        ("Gemma", {"attention_bias": True}),
        ("Gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
        ("GptOss", {"attention_bias": False, "num_local_experts": 4}),
        ("DeepseekV3", EXPERTS | {"n_routed_experts": 4, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
        ("DeepseekV3", EXPERTS | {"n_routed_experts": 4, "attention_bias": True, "n_shared_experts": 2}),
    ],
)
def test_every_setting_that_changes_a_shape(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """The file is one that transformers writes, with all defaults of the class."""
    config = getattr(transformers, f"{name}Config")(**SMALL | changes, architectures=[f"{name}ForCausalLM"])
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert rows_and_sizes(from_file(written, tmp_path).shapes().values()) == expected_shapes(written)


@pytest.mark.parametrize("moe", [{"moe_layers": [0, 3]}, {"interleave_moe_layer_step": 2}])
def test_layers_with_experts_of_llama4(moe: dict[str, Any], tmp_path: Path) -> None:
    (scout,) = [published.config for published in PUBLISHED if "Scout" in published.source]
    config = scout["text_config"] | {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 4} | moe
    assert rows_and_sizes(from_file(config, tmp_path).shapes().values()) == expected_shapes(config)


def test_the_trainers_own_structure() -> None:
    """The names of parameters are the trainer's, and the simulation runs its model."""
    decoder = read_model("llama3-8b", ["n_layers=2"])
    assert decoder.shapes() == local_shapes(decoder.as_trainer(), tp=1, tp_rank=0)
    with pytest.raises(ValueError, match="--simulate runs the trainer's model, which has no head_dim: leave it out"):
        read_model("llama3-8b", ["head_dim=64"]).as_trainer()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "config.json:2: architectures ['GPT2LMHeadModel']: a structure that is not known; allowed: LlamaForCausal",
        ),
        ({"architectures": None}, "config.json:1: architectures None: a structure that is not known"),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "config.json:1: text_config is missing"),
        ({"architectures": ["MixtralForCausalLM"]}, "is missing, whose default differs between classes"),
        ({"intermediate_size": None}, "intermediate_size is missing, whose default differs between classes"),
        ({"hidden_size": "big"}, "config.json:7: Expected `int"),
        ({"num_attention_heads": 7}, "model.dim 4096 is not divisible by n_heads 7: set head_dim"),
        ({"head_dim": 63}, "head dimension 63 must be even for RoPE"),
        ({"num_key_value_heads": 5}, "model.n_heads 32 is not divisible by n_kv_heads 5"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq: quantized weights cannot be trained"),
        ({"auto_map": {"AutoModel": "mine.Model"}}, "the model has code of its own (auto_map)"),
    ],
)
def test_structures_that_are_refused(changes: dict[str, Any], message: str, hf_config: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_model(hf_config(**changes), [])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.toml", "", "or give the path of a .yaml like those in conformance/sizing/models, or of a config.json"),
        ("absent.yaml", None, "absent.yaml:1: cannot be read: No such file or directory"),
        ("short.yaml", "dim: 64\nn_layers: 2\n", "short.yaml:1: vocab_size, n_heads, n_kv_heads, ffn_dim missing"),
        ("other.yaml", "dim: 64\nlayers: 2\n", "missing"),
        ("empty.json", "", "the top level must be a mapping"),
        ("broken.json", '{"model_type": ', "broken.json:1: "),
    ],
)
def test_files_that_are_no_models(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_model(str(file), [])
