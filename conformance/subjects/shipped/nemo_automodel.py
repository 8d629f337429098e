"""NeMo Automodel's Qwen 3 with experts, its deferred synchronisation and its clipping, in a loop like its recipe's.

Tried with nemo-automodel 0.7.0. https://docs.nvidia.com/nemo/automodel
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from conformance.subjects import LoopConfig, language_model, own_loop, use_shims

use_shims("cuda-as-processor")

from nemo_automodel.components.models.common import BackendConfig  # noqa: E402
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM  # noqa: E402
from nemo_automodel.components.moe.parallelizer import apply_ep, apply_fsdp  # noqa: E402
from nemo_automodel.components.training import utils  # noqa: E402
from transformers import Qwen3MoeConfig  # noqa: E402

VOCABULARY = 64
_OBJECTIVE = language_model(VOCABULARY)


def qwen3_moe() -> Any:
    """Return two layers of four experts each, initialised."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.0,
    )
    model = Qwen3MoeForCausalLM(config, backend=BackendConfig(rms_norm="torch"))
    model.initialize_weights(buffer_device=torch.device("cpu"), dtype=torch.float32)
    return model


@own_loop(model=qwen3_moe, **_OBJECTIVE, meshes=["dp2", "hsdp2x2"])
def nemo_automodel(config: LoopConfig) -> Iterator[None]:
    """Train with whole experts, which FSDP2 shards like other layers."""
    model: Any = config.model()
    for module in (*model.model.layers.values(), model):
        fully_shard(module, mesh=config.device_mesh())
    return train(config, model)


@own_loop(model=qwen3_moe, **_OBJECTIVE)
def nemo_automodel_experts(config: LoopConfig) -> Iterator[None]:
    """Train with expert parallelism over the ranks that see different data."""
    model = config.model()
    experts = init_device_mesh(config.device.type, (1, dist.get_world_size()), mesh_dim_names=("ep_shard", "ep"))
    apply_ep(model, experts["ep"])
    apply_fsdp(model, config.device_mesh(), ep_enabled=True, ep_shard_enabled=False, mp_policy=config.mixed_precision)
    return train(config, model, moe_mesh=experts, ep_axis_name="ep", dp_group_size=experts.size())


def train(config: LoopConfig, model: Any, **expert_options: Any) -> Iterator[None]:
    """Divide by the labels of all ranks, and synchronise gradients in the last micro-batch."""
    optimizer = config.optimizer(model.parameters())
    for batches in config.steps:
        labels = torch.stack([(batch["labels"] != -100).sum() for batch in batches]).sum()
        dist.all_reduce(labels)
        utils.prepare_for_grad_accumulation([model])
        for index, batch in enumerate(batches):
            if index == len(batches) - 1:
                utils.prepare_for_final_backward([model])
            torch.autograd.backward(_OBJECTIVE["loss"](model, batch) * dist.get_world_size() / labels)
        utils.scale_grads_and_clip_grad_norm(config.max_norm, [model], grad_norm_backend="te", **expert_options)
        optimizer.step()
        optimizer.zero_grad()
        yield
