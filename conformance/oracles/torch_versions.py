"""What differs between versions of torch in what the models predict; see `memory_model` for the letters."""

import msgspec

from conformance.oracles.dtype_policy import dtype_policy
from reference_trainer.config import TrainerConfig


class VersionTraits(msgspec.Struct, frozen=True):
    """What differs between versions of torch."""

    previous_gather_until_copied: bool = True
    """In forward the output of the previous all-gather is kept until the next one is copied out (up to 2.13)."""
    last_gradient_until_reduced: bool = True
    """The gradient of a group's last parameter is held until the group is reduced, in a variable of a loop over all of
    them (`foreach_reduce`, up to 2.13)."""
    gradients_have_own_dtypes: bool = False
    """If gradients are reduced in a wider dtype than the parameters have, B has the parameters' dtype up to 2.13: FSDP
    casts it after a group's backward, into L, or while I is filled.

    From 2.15 on `Tensor.grad_dtype` of unsharded parameters is None during backward, which leaves gradients in the
    dtype in which they are computed. Autograd casts to the reduce dtype only those of the first of several
    micro-batches, and adds the others to them, and those of parameters replicated over tensor-parallel ranks, over
    which they may have to be summed. So there is no L, and a norm that computes in fp32 has an fp32 gradient in a group
    of bf16 ones (`_set_unsharded_grad_dtypes`, `may_reduce_grad_outside_dp`, `chunk_cat_mixed_dtype`).
    """
    one_rank_communicates: bool = False
    """A shard group of one rank gathers and reduces like others, also p-norms in clipping, up to 2.8
    (https://github.com/pytorch/pytorch/pull/160135 and https://github.com/pytorch/pytorch/pull/162021)."""
    norms_reduced_one_by_one: bool = True
    """The p-norms of parameters, which are pending on the mesh, are reduced before they are combined; up to 2.9 only
    their combination is, one number. That is right for equal p, but not for other pending reductions, and DTensor gave
    it up for all (https://github.com/pytorch/pytorch/pull/165962; https://github.com/pytorch/pytorch/issues/170862
    shows that 2.9.1 still returned a pending norm)."""


UP_TO_2_8 = VersionTraits(one_rank_communicates=True, norms_reduced_one_by_one=False)
UP_TO_2_9 = VersionTraits(norms_reduced_one_by_one=False)
UP_TO_2_13 = VersionTraits()
FROM_2_15 = VersionTraits(
    previous_gather_until_copied=False, last_gradient_until_reduced=False, gradients_have_own_dtypes=True
)


def traits_of(torch_version: str) -> VersionTraits:
    """Of torch 2.14 nothing is known: it is taken to be like 2.15. 2.9, 2.11 and 2.12 have not been run."""
    major, minor = (int(part) for part in torch_version.split("+")[0].split(".")[:2])
    rows = (((2, 8), UP_TO_2_8), ((2, 9), UP_TO_2_9), ((2, 13), UP_TO_2_13))
    return next((row for last, row in rows if (major, minor) <= last), FROM_2_15)


def gradients_stay(config: TrainerConfig, traits: VersionTraits) -> bool:
    """Whether gradients that wait for the last micro-batch stay with their parameters, for autograd to add to them."""
    policy = dtype_policy(config.precision)
    return traits.gradients_have_own_dtypes or policy.compute == policy.reduce
