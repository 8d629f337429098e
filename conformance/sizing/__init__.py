"""Sizing: memory and traffic of a model of any size on a mesh of any size, for the command `predict`.

Oracles predict; only activations are estimated. Start reading at `prediction` (a request and its numbers, and the
settings that fit a device). `models` reads shapes, `activations` estimates, `rendering` makes text, JSON and a chart,
and `simulation` runs the step on fake tensors and compares.

May import oracles, `plan.mesh` and the modules below them, and for the simulation experiments and instruments. Imported
by `cli.predict` alone; needs torch.
"""
