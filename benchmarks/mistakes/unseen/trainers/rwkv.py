"""Linear attention with a decay for each channel (RWKV), whose head stays in fp32 next to layers in bf16.

conformance judge rwkv.py:parallelize
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from conformance.subjects import subject

VOCAB, DIM, TOKENS, LAYERS = 31, 20, 9, 2


def shifted(x: Tensor) -> Tensor:
    """Return each token's predecessor, (samples, tokens, DIM); that of the first one is zero."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


def fill(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter, which may be sharded, the values of a full tensor."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    parameter.copy_(value)


class TimeMix(nn.Module):
    """Weighted mean of the values before each token, in which weights decay with time."""

    def __init__(self) -> None:
        super().__init__()
        self.mix_k, self.mix_v, self.mix_r = (nn.Parameter(torch.empty(DIM)) for _ in range(3))
        self.decay, self.first = nn.Parameter(torch.empty(DIM)), nn.Parameter(torch.empty(DIM))
        self.key, self.value, self.receptance, self.output = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        before = shifted(x)
        k, v, r = (
            layer(x * mix + before * (1 - mix))
            for layer, mix in (
                (self.key, self.mix_k),
                (self.value, self.mix_v),
                (self.receptance, self.mix_r),
            )
        )
        return cast("Tensor", self.output(torch.sigmoid(r) * self.weighted(k.float(), v.float()).type_as(r)))

    def weighted(self, k: Tensor, v: Tensor) -> Tensor:
        """Return the weighted means, in at least the precision of fp32; the weight of the token itself is learnt."""
        decay, first = torch.exp(-torch.exp(self.decay.type_as(k))), self.first.type_as(k)
        numerator, denominator, means = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
        for key, value in zip(k.unbind(1), v.unbind(1), strict=True):
            now = torch.exp(first + key)
            means.append((numerator + now * value) / (denominator + now))
            numerator = decay * numerator + torch.exp(key) * value
            denominator = decay * denominator + torch.exp(key)
        return torch.stack(means, 1)


class ChannelMix(nn.Module):
    """Gated network on a token and its predecessor."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(DIM))
        self.key, self.value = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        self.receptance = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        y = x * self.mix + shifted(x) * (1 - self.mix)
        return torch.sigmoid(self.receptance(y)) * cast("Tensor", self.value(F.relu(self.key(y)).square()))


class Layer(nn.Module):
    """Mixing over time and over channels, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.time_mix, self.channel_mix = TimeMix(), ChannelMix()

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        x = x + self.time_mix(self.norm1(x))
        return cast("Tensor", x + self.channel_mix(self.norm2(x)))


class Rwkv(nn.Module):
    """Small RWKV."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm_in = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm_out, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Give values to all parameters."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                module.reset_parameters()
        ramp = torch.linspace(0, 1, DIM)
        with torch.no_grad():
            for layer in self.layers:
                time_mix, channel_mix = cast("TimeMix", layer.time_mix), cast("ChannelMix", layer.channel_mix)
                fill(time_mix.decay, 4 * ramp - 3)
                fill(time_mix.first, ramp.flip(0))
                for mix in (time_mix.mix_k, time_mix.mix_v, time_mix.mix_r, channel_mix.mix):
                    fill(mix, ramp.sqrt())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB), computed in the dtype of the head."""
        x = self.norm_in(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.head(self.norm_out(x).to(self.head.weight.dtype)))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Return tokens and the next ones; of each sample the first ones are a prompt, which does not count."""
    tokens = torch.randint(VOCAB, (3, TOKENS + 1), generator=generator)
    prompts = torch.randint(0, TOKENS - 1, (3, 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(torch.arange(TOKENS) < prompts, -100)}


def loss(model: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return the summed cross entropy."""
    logits = model(data["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits.float(), data["labels"].flatten(), reduction="sum")


@subject(
    model=Rwkv,
    loss=loss,
    batch=batch,
    initialize=Rwkv.init_weights,  # type: ignore[arg-type]
    optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=2e-3),
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Rwkv, mesh: DeviceMesh, config: Any) -> nn.Module:
    """Shard layers, and the head as a group whose parameters are gathered in fp32."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model.head, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(model, mesh=mesh, mp_policy=config.mixed_precision)
    return model
