"""Coverage of torch's own Python by runs that laws judge: branches of its modules, and parameters of their interfaces.

`recording` measures in the ranks, `counting` counts over all judged runs of a session.
"""
