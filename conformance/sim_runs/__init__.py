"""Programs of other people on the simulated device: scripts, tests, and PyTorch's own tests.

`running` starts a script; each other module or folder serves one command of `conformance sim`. May import everything
up to `experiments`.
"""
