"""Report of a session: the files that programs read, and the texts and charts that people read.

`schema` has the fields of report.json and report.jsonl. `text` and `html` show a report: `headline` says what it is
worth, `failure_groups` what failed, by cause, `smallest` on which cell at least. `diff` compares two, and `drift` says
which metrics differ by more than noise. `law_overview`, `axis_map`, `plots` and `versions` prepare sections of the
HTML. `cell_facts` and `environment` collect what a report has besides its cases. Start reading at `schema`.

May import `conformance.judge` and all below it, never torch: a report is written and read where nothing is trained.
"""
