"""Static site of many reports: versions of torch and devices as columns, laws and findings as rows.

`content` turns reports into the data of the pages, `pages` renders them. Nothing is judged or measured again: all
figures are those of the reports.

May import `report` and what that may import; `cli` alone imports it. Start reading at `pages.site_files`.
"""
