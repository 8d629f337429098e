"""Numerics of a process: which kernels compute, in which order they and collectives add, and what must be pinned."""
