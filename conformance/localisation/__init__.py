"""Localisation: the first wrong place of a run, found by one more run with taps on every module.

Start at `localise.py`. Taps of ranks are `conformance.instruments.taps`; the found place is a
`conformance.report.location.Location`.
"""
