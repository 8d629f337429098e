"""Laws of state: initialisation after `to_empty`, checkpoints, state dicts."""
