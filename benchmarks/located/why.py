"""Reasons of the places that explanations name wrongly, by fault."""

_METRIC = "the law reports a metric and no more; the place is that of its trial"
_DELAY = (
    "on the CPU a delayed operator shows the first tensor that changes, and not the operator that should have waited; "
    "on a device or the simulated one, STREAM-6 has the pair"
)

WHY = {
    "tp-sums-cut": (
        "the cut of four bits is below the bound of two computations in fp32 in different orders, with which taps of "
        "tensor-parallel runs are compared"
    ),
    "compiled-backward-off": (
        "the fault is a hook on the tensor between the block and the norm behind it; the gradient of this tensor is "
        "first seen as that of the norm's input"
    ),
    "reduce-dtype-dropped": "the collective is the expected one; its stage is told as `schedule`",
    "partial-sum-averaged": _METRIC,
    "exchange-loses-a-row": _METRIC,
    "torch-clip-values-from-above": _METRIC,
    "record-stream-on-collectives": _METRIC,
    "all-reduce-buffer-reused": _DELAY,
    "result-before-its-time": _DELAY,
    "pipeline-receive-not-awaited": _DELAY,
    "pipeline-sent-gradients-kept": "the line that allocates the gradients is named, and not that they have been sent",
    "clip-order-of-ranks": "stacks tell line and collective of each rank, and not the groups",
    "conditional-param-use-hang": "stacks tell that backward gathers, and not for which module",
    "sharded-over-one-rank": "the first law that fails judges the schedule: it names the gathers that are missing",
    "unsharded-after-backward": (
        "the first law that fails judges the schedule: it names the group that is unsharded, which is the fault itself"
    ),
}
