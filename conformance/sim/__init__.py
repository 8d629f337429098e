"""Simulated accelerator: a device `sim` whose streams follow a schedule, for races that a GPU only samples.

`building` compiles the device once for each torch and compiler, and needs no torch itself; `device` makes it the
accelerator of a process; `schedules` determines when queued operators run; `csrc` is the device.
docs/simulated_accelerator.md says what it proves.
"""
