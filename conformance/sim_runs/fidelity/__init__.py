"""Fidelity of the simulated device: each rule of its model, the sources of the rule, and programs that measure it.

`rules` reads the table rules.yaml, `probes` has a function for each rule that a program can measure, on the simulated
device as on a GPU, `measuring` runs them, and `report` compares and renders the results.
"""
