"""Values of options that go with another option, by their names; all other values are refused."""

CONTEXT_GOES_WITH: dict[str, tuple[object, ...]] = {
    "mesh.pp": (1,),
    "model.n_experts": (0,),
    "model.arithmetic": ("float",),
    "passes": (1,),
    "compile": ("none",),
    "implementation": ("fsdp2",),
}
"""Values with `mesh.cp` above 1.

A backward of several passes would be outside of the contexts of all but the last; the replaced attention is no graph
that can be compiled; integer arithmetic has another attention.
"""
COMPILED_MODEL_GOES_WITH: dict[str, tuple[object, ...]] = {
    "compile": ("inductor", "aot_eager"),
    "mesh.tp": (1,),
    "mesh.pp": (1,),
    "implementation": ("fsdp2",),
    "float8": ("none",),
}
"""Values with `compiled` model.

Dynamo cannot trace the output hook of an embedding whose rows are sharded over tp: "Please convert all Tensors to
FakeTensors first" (torch 2.13). A pipeline calls its stages, which are other modules. Float8 was not tried.
"""
FLOAT8_GOES_WITH: dict[str, tuple[object, ...]] = {
    "mesh.tp": (1,),
    "model.n_experts": (0,),
    "model.arithmetic": ("float",),
    "implementation": ("fsdp2",),
}
"""Values with `float8` other than none.

Tensor-parallel ranks would have to agree on the scale of each operand that they share; whole numbers beyond 16 are no
float8 numbers.
"""
TENSORWISE_GOES_WITH: dict[str, tuple[object, ...]] = {
    "offload": ("none",),
}
"""Values with `float8` tensorwise: a copy of a weight on another device has lost its scale (torchao 0.18)."""
FSDP1_GOES_WITH: dict[str, tuple[object, ...]] = {
    "init": ("full",),
    "precision": ("fp32", "bf16-mp"),
    "reshard": ("default", "never"),
    "offload": ("none",),
    "accumulation": (1,),
    "passes": (1,),
    "evaluation": ("none",),
    "frozen": ((),),
    "skipped": ((),),
    "activation_checkpointing": ("none",),
    "compile": ("none",),
    "norms_in_tp": (True,),
    "mesh.dp_replicate": (1,),
    "model.tied_embeddings": (False,),
    "grouping": ("blocks-and-ends",),
    "shard_placement": ("rows",),
    "gradient_divisor": (None,),
    "optimizer.implementation": ("auto",),
    "optimizer.norm_type": (2.0,),
    "optimizer.error_if_nonfinite": (False,),
    "optimizer.foreach_clip": (True,),
}
"""Values of options that the suite compares with FSDP1, which itself supports more."""
