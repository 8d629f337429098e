"""Numerics of a process: its kernels, the order of sums in kernels and collectives, and the pinned knobs."""
