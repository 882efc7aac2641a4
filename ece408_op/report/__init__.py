"""Milestone report: runs programs, stores their output, and writes the report.

`plan` lists the programs, `collect` runs them and stores their output, `document` turns it into
Markdown with the pictures of `overview`, `figures` and `timeline` and the student's notes, and
`page` turns that into one HTML file.
"""
