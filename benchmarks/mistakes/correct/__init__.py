"""Correct trainers of other kinds than any on which the suite was built; no test uses them."""
