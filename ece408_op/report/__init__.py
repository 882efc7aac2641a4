"""The milestone report: runs programs, keeps what they print, and writes the report.

`plan` says which programs to run, `collect` runs them and keeps what they print, `document` makes
a Markdown text of that, with the pictures of `overview`, `figures` and `timeline` and the notes
that a student has added, and `page` turns it into one HTML file.
"""
