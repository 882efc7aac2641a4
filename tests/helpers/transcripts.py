"""Comparison of printed output with the transcripts in documents."""

import re

_NUMBER = r"\d[\d.,]*(?:e-?\d+)?"
# Instruction sets, their fastest kernels, and times are this machine's; a name may be longer than
# the page's.
_KERNEL = r"[a-z][a-z_]*_(?:avx512|avx2|baseline)\b"
# A ranking remarks on a spread only where times are unsteady, and has the column only for remarks.
_UNSTEADY = r" +(?:remarks|spread \d+%)$"
_VARIES = re.compile(rf"{_UNSTEADY}|{_KERNEL}|{_NUMBER}|avx512|avx2|baseline(?=\n|$)| +|\.\.\.")


def pattern(expected: str) -> str:
    """Return a regular expression for a transcript: numbers, instruction sets, CPU kernels, the
    width of gaps and remarks on a spread may differ; `...` alone on a line stands for lines,
    elsewhere for any text."""
    lines = []
    for line in expected.splitlines():
        if line == "...":
            lines.append(r"(?:.*\n)*?")
            continue
        text, at = "", 0
        for each in _VARIES.finditer(line):
            text += re.escape(line[at : each.start()])
            if re.fullmatch(_UNSTEADY, each[0]):
                text += rf"(?:{_UNSTEADY[:-1]})?"
            elif re.fullmatch(_KERNEL, each[0]):
                text += r"[a-z][a-z_]*_(?:avx\w+|baseline)"
            else:
                text += {" ": " +", ".": ".*"}.get(each[0][0], r"(?:[\d.,e-]+|avx\w+|baseline)")
            at = each.end()
        lines.append(text + re.escape(line[at:]) + r" *\n")
    return "".join(lines)
