"""Reasons of the places that explanations name wrongly, by fault."""

WHY = {
    "tp-sums-cut": (
        "the cut of four bits is below the bound of two computations in fp32 in different orders, with which taps of "
        "tensor-parallel runs are compared"
    ),
    "compiled-backward-off": (
        "the fault is a hook on the tensor between the block and the norm behind it; the gradient of this tensor is "
        "first seen as that of the norm's input"
    ),
}
