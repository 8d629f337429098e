"""What the test of a law may raise, besides plain assertions, to end with a verdict; see also `judge.skips`.

Ranks import this with the oracles: nothing of pytest belongs here.
"""


class ConformanceFailure(AssertionError):
    """A comparison that a law demands did not hold."""
