"""Names of precisions."""

from typing import Literal

PrecisionName = Literal[
    "fp32", "bf16-mp", "bf16-init", "bf16-reduce", "bf16-params", "bf16-mixed", "fp16-mp", "fp16-reduce"
]
