"""First runs on a device, in two calls of a few minutes each, between which somebody thinks: `ci/device_trial.sh`.

Each stage is a program that prints a value for each line, or a session of the suite. What a stage cannot mean anything
without is named: if that has failed, the stage is left out.
"""
