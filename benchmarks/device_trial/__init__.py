"""First runs on a device, in two calls of a few minutes each, with time to think in between: `ci/device_trial.sh`.

Each stage is a program that prints a value for each line, or a session of the suite. A stage names the stages without
whose success it means nothing: if one has failed, the stage is left out.
"""
