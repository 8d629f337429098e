"""Warm ranks of the suite and of torch's own tests, side by side: `python -m benchmarks.warm_runs`."""
