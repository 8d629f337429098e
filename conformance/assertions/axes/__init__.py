"""Proofs for AXIS-1: the changes that each value of an axis must make to the record of a run.

May import what laws may. Start reading at `proofs`; larger proofs have modules of their own.
"""
