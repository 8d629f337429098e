"""Workloads: values of axes as the trainer's configuration has them: models, data, optimizers, tables of groups."""

from msgspec.structs import replace

from reference_trainer.config import DataConfig, Frozen, LossScaleConfig, ModelConfig, OptimizerConfig, Skipped

# Chosen so that faults show: a vocabulary that no world size divides, non-zero biases, norm weights other than 1,
# unequal numbers of valid tokens per sample.
_TINY_MODEL = ModelConfig(
    vocab_size=61,
    dim=32,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=64,
    max_seq_len=32,
    bias=True,
    init_std=0.1,
    bias_std=0.1,
    norm_std=0.2,
)
MODELS = {
    "tiny": _TINY_MODEL,
    "even": replace(_TINY_MODEL, vocab_size=64),
    # Over 4 and 8 data-parallel ranks shards differ in size, or are empty.
    "uneven": replace(_TINY_MODEL, dim=30, n_heads=5, n_kv_heads=1, ffn_dim=45),
    # Two tensor-parallel ranks have equal shards, which data-parallel ranks cannot shard evenly.
    "uneven-tp": replace(_TINY_MODEL, dim=36, n_heads=6, n_kv_heads=2, ffn_dim=50),
    "integer": replace(_TINY_MODEL, arithmetic="integer"),
    # Two or four stages of a pipeline do not all have as many layers.
    "cut": replace(_TINY_MODEL, n_layers=5),
    # In worlds of up to 1024 ranks each rank has a shard of every parameter.
    "wide": replace(
        _TINY_MODEL, vocab_size=1024, dim=1024, n_layers=4, n_heads=8, n_kv_heads=8, ffn_dim=1024, bias=False
    ),
    "deep": replace(_TINY_MODEL, dim=64, n_layers=8, ffn_dim=256),
    "half": replace(_TINY_MODEL, dim=64, n_layers=4, ffn_dim=256),
    # Rows beyond a kernel's block of 256, groups beyond the megabyte that gloo sends at once, and more layers than any
    # ring of buffers or of prefetched groups is long. Three ranks have unequal shards of every matrix.
    "large": replace(_TINY_MODEL, vocab_size=263, dim=272, n_layers=6, n_heads=8, ffn_dim=340, max_seq_len=256),
    # A balance loss that is a tenth of the loss, so that its gradient shows.
    "experts": replace(_TINY_MODEL, n_experts=8, experts_per_token=2, ffn_dim=32, balance_weight=0.1),
}
DATA = DataConfig(seq_len=16, min_valid_fraction=0.25)
LARGE_DATA = replace(DATA, seq_len=256)
LARGE_BATCH_SIZE = 8
"""Samples of a data-parallel rank per step with the model `large`: 2,048 tokens.

Up to 1,024 CUDA takes another kernel for the backward of embeddings."""
GLOBAL_BATCH_SIZES = (16, 24)
"""Samples per step; the second is for three data-parallel ranks, which do not divide the first."""
# AdamW's epsilon is of the order of the gradients: with the usual 1e-8 the update is insensitive to the gradients'
# scale (a constant factor passes unseen) and infinitely sensitive to rounding where a gradient is nearly zero.
ADAMW, SGD = OptimizerConfig(name="adamw", lr=0.01, eps=0.001), OptimizerConfig(name="sgd", lr=0.1)
OPTIMIZERS = {
    "adamw": ADAMW,
    "adamw-foreach": replace(ADAMW, implementation="foreach"),
    "adamw-fused": replace(ADAMW, implementation="fused"),
    "sgd": SGD,
    "sgd-momentum": replace(SGD, momentum=0.9),
}
# The integer model is exact if all that scales is a power of two: learning rate and number of valid tokens.
INTEGER_DATA = replace(DATA, min_valid_fraction=1.0)
INTEGER_LEARNING_RATE = 2.0**-4
RESHARD: dict[str, int | dict[str, str | int]] = {
    "k2": 2,
    "table": {r"layers\.0": "never", r"layers\..*": "always", "output": "never"},
}
# Gradients of the workload overflow above 2^16 to 2^18, by seed: the last of four steps is taken from 2^19 in any case.
LOSS_SCALE = {"fits": LossScaleConfig(initial=2.0**14, growth_interval=2)}
LOSS_SCALE["overflows"] = replace(LOSS_SCALE["fits"], initial=2.0**19)
FROZEN = {
    "none": (),
    "embedding": (Frozen(names=r"tok_embeddings\..*"),),
    "norms": (Frozen(names=r".*norm\..*"),),
    "block": (Frozen(names=r"layers\.0\..*"),),
    "thawed": (Frozen(names=r"layers\.0\..*", until=1),),
}
_RUNS_ALONE = Skipped(block=1, passes=(False, True, True))
SKIPPED = {
    "none": (),
    # With one micro-batch the second of three steps does not compute the block, nor the third; with two micro-batches
    # the first step computes it in the first alone, the second in the last alone, and the third not at all.
    "block": (_RUNS_ALONE,),
    "blocks": (_RUNS_ALONE, Skipped(block=0, passes=(False, False, False, True))),
}
DIVISORS = {"half": 0.5, "twice": 2.0}
"""Divisors of gradients as multiples of the number of data-parallel ranks: powers of two, which round nothing."""
