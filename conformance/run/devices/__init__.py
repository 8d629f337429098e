"""Devices and processors that ranks compute on: discovery, leases, and the choice of a substrate.

May import plan and `run.ranks.messages`; torch-free, devices are found through NVML. Start reading at `hardware`, then
`leases`.
"""
