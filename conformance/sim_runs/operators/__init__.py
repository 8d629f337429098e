"""Sweep of torch's operator database: each operator on the simulated device against the same on the CPU, in every bit.

`database` has torch's operators and samples, `samples` places a sample on a device, `variants` calls an operator in one
way, `comparing` judges, `worker` is a process that may die, `sweep` goes through all cases, `rendering` shows them.
"""
