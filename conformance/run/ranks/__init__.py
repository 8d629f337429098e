"""Processes of ranks: the rank server, the ranks that it forks, and their client in the pytest worker.

May import plan, run and the modules below them. Torch is imported in the server and in ranks only (`server`, `process`,
`process_groups`, `preload` at run time); `client` and `messages` belong to the pytest worker too. Start reading at
`messages`, then `server`, `process` and `client`.
"""
