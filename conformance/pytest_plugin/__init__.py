"""Pytest plugin: a session of pytest that collects, orders, judges and reports the cases of a profile.

May import everything but experiments, detection and cli, of laws the registry alone; torch-free. Start reading at
`plugin` (options, activation), then `session` (hooks of every process) and `controller` (results and report). `setup`
reads the options, `cases` has shards and the order of cases, `terminal` the early end of a session, `shrinking` and
`locating` the searches for the smallest failing cells and the first wrong places at its end.
"""
