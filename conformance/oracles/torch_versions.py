"""Version traits: behaviour of torch that the models of memory and traffic predict, and that differs between releases.

Letters such as A and B are the buffers of a group, see `memory_walk`.
"""

import msgspec
from msgspec.structs import replace

from conformance.oracles.dtype_policy import dtype_policy
from conformance.torch_release import release
from reference_trainer.config import TrainerConfig


class VersionTraits(msgspec.Struct, frozen=True):
    """Behaviour of FSDP2, DTensor and autograd in one release of torch."""

    previous_gather_until_copied: bool = True
    """True if in forward A of the previous group is held until the group at hand has copied its own out.

    Up to 2.14; from 2.15 on A is freed before that copy. Source: `prev_all_gather_state`, a variable of
    `FSDPParamGroup.wait_for_unshard` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, holds it.
    """
    last_gradient_until_reduced: bool = True
    """True if the gradient of a group's last parameter is held until the group is reduced.

    Up to 2.14. Source: the variable of a loop over all gradients of the group holds it (`foreach_reduce` in
    torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    gradients_have_own_dtypes: bool = False
    """True if B has the dtypes in which gradients are computed, although they are reduced in a wider one.

    Up to 2.14 B has the parameters' dtype, and FSDP casts it after a group's backward, into L, or while I is filled.
    From 2.15 on `Tensor.grad_dtype` of unsharded parameters is None during backward, which leaves gradients in the
    dtype in which they are computed. Autograd casts to the reduce dtype only the gradients of the first of several
    micro-batches, and adds the others to them, and the gradients of parameters replicated over tensor-parallel ranks,
    over which they may have to be summed. So there is no L, and a norm that computes in fp32 has an fp32 gradient in a
    group of bf16 ones. Source: `_set_unsharded_grad_dtypes`, `may_reduce_grad_outside_dp`, `chunk_cat_mixed_dtype`.
    """
    one_rank_gathers: bool = False
    """True if a shard group of one rank gathers like larger ones.

    Up to 2.8, as run: 2.9.1 gathers nothing. See https://github.com/pytorch/pytorch/pull/160135.
    """
    one_rank_reduces: bool = False
    """True if a shard group of one rank reduces gradients like larger ones, and p-norms in clipping.

    Up to 2.9, as run: 2.10.0 reduces nothing. See https://github.com/pytorch/pytorch/pull/162021.
    """
    norms_reduced_one_by_one: bool = True
    """True if the p-norms of parameters, which are pending on the mesh, are reduced before they are combined.

    Up to 2.9 only their combination is reduced, one number. That is right for equal p, but not for other pending
    reductions, and DTensor gave it up for all. Source: https://github.com/pytorch/pytorch/pull/165962;
    https://github.com/pytorch/pytorch/issues/170862 shows that 2.9.1 still returned a pending norm.
    """
    recomputation_reshards: bool = False
    """True if a group inside of a checkpointed block reshards again after its recomputed forward.

    Up to 2.9: backward gathers it once more, and prefetches in an order that the recomputed forward has changed.
    Source: `FSDPParamGroup.post_forward`, which from 2.10 on asks `is_bw`; https://github.com/pytorch/pytorch/pull/164009.
    """
    stages_exchange_a_number: bool = False
    """True if the stages of a pipeline send each other one number before their first step, to connect.

    Up to 2.12. Source: `_get_init_p2p_neighbors_ops` in torch/distributed/pipelining/stage.py.
    """
    stages_finalize_backward: bool = False
    """True if a stage of a pipeline reduces its gradients from its last group on, inner ones first.

    Up to 2.14 from its first group on. Source: `perform_reduce_grad` in torch/distributed/pipelining/stage.py, which
    from 2.15 on calls `FSDPModule.finalize_backward`.
    """
    stages_pool_buffers: bool = False
    """True if a stage of a pipeline allocates buffers of transfers as its schedule needs them, and drops sent outputs.

    Up to 2.14 each micro-batch has separate buffers from the first step on. From 2.15 on they are not held between
    steps; the memory model does not know when they are. Source: `release_fwd_send_outputs` in
    torch/distributed/pipelining/stage.py, and the slots in schedules.py there.
    """
    halves_keep_gradients: bool = True
    """True if the first half of a backward leaves the gradient that it sends at the buffer of its input.

    Up to 2.14 the next step releases it: a fault of torch, for which MEM-6 is waived
    (`findings/zero_bubble_keeps_gradients.py`). MEM-1 counts these gradients: under a waiver it could not judge other
    memory. Source: `stage_backward_input` in torch/distributed/pipelining/_backward.py.
    """
    halves_copy_gradients: bool = False
    """True if the second half of a backward copies the gradients that the first half has kept, one after another.

    Up to 2.11. Source: `summed_grad` in `stage_backward_weight` of torch/distributed/pipelining/_backward.py.
    """

    reduces_partial_sums_alone: bool = False
    """True if FSDP reduces zeros with sums that wait for the all-reduce when it leaves a group without gradients.

    From 2.15 on, for groups that a forward has not used. It also leaves a group without gradients where a backward has
    yet to come to other forward passes. Source: `FSDPParamGroup._get_unsharded_grad_to_reduce`.
    """
    uneven_gathers_are_views: bool = False
    """True if a tensor that DTensor gathers from uneven shards is a view of the padded memory that was gathered.

    Up to 2.12, as run on 2.11; from 2.13 on it is copied. Source: `Shard._maybe_unpad_tensor` in
    torch/distributed/tensor/placement_types.py.
    """


UP_TO_2_12 = VersionTraits(stages_exchange_a_number=True, uneven_gathers_are_views=True)
UP_TO_2_11 = replace(UP_TO_2_12, halves_copy_gradients=True)
UP_TO_2_9 = replace(UP_TO_2_11, one_rank_reduces=True, norms_reduced_one_by_one=False, recomputation_reshards=True)
UP_TO_2_8 = replace(UP_TO_2_9, one_rank_gathers=True)
UP_TO_2_14 = VersionTraits()
FROM_2_15 = VersionTraits(
    previous_gather_until_copied=False,
    last_gradient_until_reduced=False,
    gradients_have_own_dtypes=True,
    reduces_partial_sums_alone=True,
    stages_finalize_backward=True,
    stages_pool_buffers=True,
    halves_keep_gradients=False,
)
_LAST_RELEASES = (
    ((2, 8), UP_TO_2_8),
    ((2, 9), UP_TO_2_9),
    ((2, 11), UP_TO_2_11),
    ((2, 12), UP_TO_2_12),
    ((2, 14), UP_TO_2_14),
)
"""Last release with each set of traits, in ascending order."""


def traits_of(torch_version: str) -> VersionTraits:
    """Return the traits of a version of torch, such as `2.13.0+cpu`.

    An unknown version has the traits of the last known one. Raises ValueError for a text that is no version.
    """
    installed = release(torch_version)
    return next((traits for last, traits in _LAST_RELEASES if installed <= last), FROM_2_15)


def gradients_stay(config: TrainerConfig, traits: VersionTraits) -> bool:
    """Return whether gradients that wait for the last micro-batch stay with their parameters.

    Autograd then adds to them; otherwise FSDP keeps them separately, in the reduce dtype (L).
    """
    policy = dtype_policy(config.precision)
    return traits.gradients_have_own_dtypes or policy.compute == policy.reduce
