"""Linear layers that multiply float8 numbers, by torchao (https://github.com/pytorch/ao/tree/main/torchao/float8).

Each operand of a product is scaled so that its largest absolute value, in the whole tensor or in each row, is the
largest float8 number. With one scale for a whole weight FSDP gathers the weight in float8; its scale is then needed
before any rank has the full weight, and ranks agree on it: all of them in one all-reduce after an optimizer step.
"""

from typing import Literal

import torch
from torch import nn

from reference_trainer.checks import UsageError

Scaling = Literal["tensorwise", "rowwise"]
_MULTIPLE = 16
"""Kernels of float8 products take matrices whose numbers of rows and columns are multiples of this."""


def apply_float8(block: nn.Module, scaling: Scaling, device_type: str) -> None:
    """Let the linear layers of a block multiply in float8; those of sizes that kernels do not take stay as they are.

    On CUDA devices kernels compute the products. Elsewhere torchao emulates them: it casts operands to float8, and
    multiplies them in fp32. Raises UsageError if torchao cannot be imported.
    """
    require_torchao(scaling)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = device_type != "cuda"
    if scaling == "tensorwise":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    else:
        config = Float8LinearConfig.from_recipe_name("rowwise")
        object.__setattr__(config, "emulate", emulate)  # frozen, and a recipe takes no options
    convert_to_float8_training(block, module_filter_fn=lambda module, _name: fits(module), config=config)


def fits(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose weight has sizes that kernels take."""
    return isinstance(module, nn.Linear) and all(size % _MULTIPLE == 0 for size in module.weight.shape)


def precompute_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in float8, in one all-reduce; on every rank.

    A weight keeps its scale until the next call, whatever happens to its numbers.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def require_torchao(scaling: Scaling) -> None:
    """Raise UsageError if torchao is not installed, or does not go with this torch."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"float8 {scaling} needs torchao, which cannot be imported with torch {torch.__version__}: {error}; "
            "install a torchao that fits this torch, or use float8 none"
        ) from None
