"""PyTorch's own distributed tests on the simulated device, from a checkout of PyTorch that the user has.

`checkout` chooses the test files, `running` runs each in a process of its own (`process`), `outcomes` reads what
pytest says of it, `expectations` compares with the list of expected failures, `summary` words the result.
"""
