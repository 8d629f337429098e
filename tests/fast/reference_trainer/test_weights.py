"""Loading of weights from files: formats that are read, and files that are refused."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from reference_trainer.config import DataConfig, ModelConfig, TrainerConfig
from reference_trainer.init_weights import init_weights
from reference_trainer.model import Transformer, rope_table
from reference_trainer.weights import check_checkpoint, load_weights

TIED = ModelConfig(
    vocab_size=13, dim=16, n_layers=1, ffn_dim=24, max_seq_len=8, bias=True, bias_std=0.1, norm_std=0.2,
    tied_embeddings=True,
)  # fmt: skip
UNTIED = msgspec.structs.replace(TIED, tied_embeddings=False)


def weights(config: ModelConfig) -> dict[str, Tensor]:
    model = Transformer(config)
    init_weights(model, seed=3)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def empty_model(config: ModelConfig) -> Transformer:
    model = Transformer(config)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan)
    return model


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_loaded_and_buffers_recomputed(config: ModelConfig, stored: torch.dtype, tmp_path: Path) -> None:
    expected = {name: tensor.to(stored) for name, tensor in weights(config).items()}
    save_file(expected, tmp_path / "weights")
    model = empty_model(config)
    load_weights(model, path=tmp_path / "weights")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].float()), name
    assert torch.equal(model.rope_table, rope_table(config))
    assert (model.output.weight is model.tok_embeddings.weight) == config.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm.weight": None}, "missing norm.weight; superfluous none"),
        (
            {"output.weight": torch.ones(13, 16)},
            "missing none; superfluous output.weight; each parameter must be there",
        ),
        ({"rope_table": torch.ones(2, 8, 2)}, "superfluous rope_table;"),
        (
            {f"extra{i}": torch.ones(1) for i in range(7)},
            "superfluous extra0, extra1, extra2, extra3, extra4 and 2 more",
        ),
        ({"norm.weight": torch.ones(17)}, r"norm.weight has shape \[17\], the model's has shape \[16\]"),
        (
            {"norm.weight": torch.ones(16, dtype=torch.int8)},
            r"norm.weight is I8 of shape \[16\], must be floating point",
        ),
    ],
    ids=["missing", "tied twice", "buffer", "many", "shape", "dtype"],
)
def test_a_file_of_another_model_is_refused(changes: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    tensors = {**weights(TIED), **changes}
    path = tmp_path / "weights"
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(ValueError, match=f"checkpoint {path}.*{message}"):
        load_weights(empty_model(TIED), path=path)
    with pytest.raises(ValueError, match=message):
        check_checkpoint(TrainerConfig(model=TIED, data=DataConfig(seq_len=8), init="checkpoint", checkpoint=str(path)))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="text cannot be read as safetensors: "):
        load_weights(empty_model(TIED), path=tmp_path / "text")
    with pytest.raises(ValueError, match=r"checkpoint .*none is neither a file nor a directory"):
        load_weights(empty_model(TIED), path=tmp_path / "none")


def test_a_directory_of_torch_distributed_checkpoint_is_loaded(tmp_path: Path) -> None:
    save(dict(weights(TIED)), checkpoint_id=tmp_path / "dcp", no_dist=True)
    model = empty_model(TIED)
    load_weights(model, path=tmp_path / "dcp")
    for name, expected in weights(TIED).items():
        assert torch.equal(model.get_parameter(name), expected), name
    assert torch.equal(model.rope_table, rope_table(TIED))


def test_a_directory_of_torch_distributed_checkpoint_must_hold_the_model(tmp_path: Path) -> None:
    path = tmp_path / "dcp"
    save(
        {name: tensor for name, tensor in weights(TIED).items() if name != "norm.weight"},
        checkpoint_id=path,
        no_dist=True,
    )
    with pytest.raises(ValueError, match=r"does not hold this model: missing norm.weight"):
        load_weights(empty_model(TIED), path=path)
    (path / ".metadata").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r".metadata cannot be read"):
        load_weights(empty_model(TIED), path=path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds none of .metadata, model.safetensors.index.json and model"):
        load_weights(empty_model(TIED), path=tmp_path)
