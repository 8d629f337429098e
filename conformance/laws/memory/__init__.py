"""Laws of memory: bounds of a step and of building the model, and the comparison of FSDP2 with FSDP1."""
