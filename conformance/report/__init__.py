"""Report of a session: the files that programs read, and the texts and charts that people read.

Start reading at `schema`, the fields of report.json and report.jsonl; `facts` and `coverage` collect those that are
not cases. `explain` turns failures into causes; `text` and `html` render a report, `html` with the data of `sections`
and the SVG of `charts`. `diff` compares two reports.

May import `conformance.judge` and all below it, never torch: a report is written and read where nothing is trained.
"""
