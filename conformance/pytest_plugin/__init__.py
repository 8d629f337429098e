"""Pytest plugin: a session of pytest that collects, orders, judges and reports the cases of a profile.

May import everything but laws, experiments, detection and cli; torch-free. Start reading at `plugin` (options,
activation), then `session` (hooks of every process) and `controller` (results and report). `setup` reads the options,
`order` has shards and the order of cases, `interruption` the early end of a session.
"""
