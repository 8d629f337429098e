"""Proofs for AXIS-1: the changes that each value of an axis must make to the record of a run.

May import the same packages as laws. Start reading at `proofs`; larger proofs have separate modules.
"""
