"""Coverage of torch's own Python by runs that laws judge: branches of its modules, and parameters of their interfaces.

`recording` measures in the ranks, `figures` counts what all judged runs of a session have seen.
"""
