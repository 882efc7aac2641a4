"""The milestone report: what is run for it, what is kept, and what is written.

`plan` says which programs to run, `collect` runs them and keeps what they print, `document` makes
a Markdown text of that, with the pictures of `figures` and the notes that a student has added,
and `page` turns it into one HTML file.
"""
