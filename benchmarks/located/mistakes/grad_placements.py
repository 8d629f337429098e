"""Feed-forward network that computes on local tensors, whose ranks each have a partial gradient of the input."""

from typing import ClassVar

import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInputOutput

from benchmarks.located.mistakes.trainer import FeedForward, Llama, Trainer


def local(weight: Tensor) -> Tensor:
    """Return this rank's shard of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class LocalFeedForward(FeedForward):
    """SwiGLU on local tensors, as a fused kernel needs them."""

    def swiglu(self, x: Tensor) -> Tensor:
        """Return the output of `x`, (samples, tokens, DIM), or this rank's summand of it."""
        hidden = F.silu(F.linear(x, local(self.w1.weight))) * F.linear(x, local(self.w3.weight))
        return F.linear(hidden, local(self.w2.weight))


class WrongFeedForward(LocalFeedForward):
    """Network that takes its partial gradient of the input for the full one."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        if isinstance(x, DTensor):
            x = x.to_local()  # mistake: grad-placements
        return self.swiglu(x)


class RightFeedForward(LocalFeedForward):
    """Network that declares its gradient of the input as partial."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[Partial()])
        return self.swiglu(x)


class WrongLlama(Llama):
    """Model with these networks."""

    feed_forward_class: ClassVar[type[FeedForward]] = WrongFeedForward


class RightLlama(Llama):
    """Model with these networks."""

    feed_forward_class: ClassVar[type[FeedForward]] = RightFeedForward


class Wrong(Trainer):
    """Trainer with the mistake."""

    model_class: ClassVar[type[Llama]] = WrongLlama

    def feed_forward_style(self) -> ParallelStyle:
        """Return the style that gathers the sequence, and sums the outputs into shards of it."""
        return PrepareModuleInputOutput(
            input_layouts=(Shard(1),),
            desired_input_layouts=(Replicate(),),
            output_layouts=(Partial(),),
            desired_output_layouts=(Shard(1),),
        )


class Right(Wrong):
    """Trainer without it."""

    model_class = RightLlama
