"""A report's Markdown as one self-contained HTML file."""

from __future__ import annotations

import base64
import mimetypes
import re
from pathlib import Path
from typing import Any

from ..files.resources import imported
from . import notes, rendering

# Content wider than the screen scrolls separately.
_SCROLLS = '<div class="scroll" tabindex="0">'
_FOLD = re.compile(r"<details><summary>(.*)</summary>|</details>")
# Larger pictures are not embedded in the page.
_LARGEST_PICTURE = 8 << 20


def require() -> None:
    """Raise `InvalidSetting` unless the libraries for pages import."""
    _markdown()
    rendering.require()


def _markdown() -> Any:
    parser = imported("markdown_it", "a report needs markdown-it-py", "report").MarkdownIt
    # HTML in the text, a student's or a program's, stays text.
    made = parser("commonmark", {"html": False}).enable("table")
    made.add_render_rule("table_open", lambda *_: f"{_SCROLLS}<table>\n")
    made.add_render_rule("table_close", lambda *_: "</table></div>\n")
    return made


def render(markdown: str, title: str, folder: Path) -> str:
    """Return the page. Pictures' addresses are relative to `folder`.

    Pictures outside it, and large ones, become text, so that opening the page fetches nothing.
    Raises `InvalidSetting` without the libraries.
    """
    parser = _markdown()
    tokens = parser.parse(notes.without_marks(markdown))
    headings = _number_headings(tokens)
    for before, token, after in zip(tokens, tokens[1:], tokens[2:]):
        for child in token.children or ():
            if child.type == "image":
                _take_in(child, folder)
        _fold(before, token, after, parser)
    first = next((i for i, each in enumerate(tokens) if each.tag == "h2"), len(tokens))
    opening, body = (
        _scrolling(parser.renderer.render(part, parser.options, {}))
        for part in (tokens[:first], tokens[first:])
    )
    return rendering.render(
        "page.html.j2", title=title, headings=headings, opening=opening, body=body
    )


def _scrolling(html: str) -> str:
    """Make pictures and blocks of code scroll separately if they are too wide."""
    html = re.sub(r"<p>(<img [^>]*>)</p>", rf"{_SCROLLS}\1</div>", html)
    return html.replace("<pre>", f"{_SCROLLS}<pre>").replace("</pre>", "</pre></div>")


def _fold(opening: Any, text: Any, closing: Any, parser: Any) -> None:
    """Turn a paragraph that marks the beginning or the end of a fold into HTML."""
    found = _FOLD.fullmatch(text.content) if opening.type == "paragraph_open" else None
    if found is None:
        return
    inner = "" if found[1] is None else parser.renderInline(found[1])
    whole = "</details>" if found[1] is None else f"<details><summary>{inner}</summary>"
    opening.type, opening.content = "html_block", f"{whole}\n"
    text.type = closing.type = "html_block"
    text.content = closing.content = ""


def _number_headings(tokens: list[Any]) -> list[tuple[str, str]]:
    """Give each section's heading an address; return addresses and texts."""
    headings: list[tuple[str, str]] = []
    for token, content in zip(tokens, tokens[1:]):
        if token.type == "heading_open" and token.tag == "h2":
            words = re.sub(r"[^a-z0-9.]+", "-", content.content.lower()).strip("-")
            address = f"{len(headings) + 1}-{words}"
            token.attrSet("id", address)
            headings.append((address, content.content))
    return headings


def _take_in(image: Any, folder: Path) -> None:
    """Replace a picture's address by its contents, or the picture by its description."""
    address = str(image.attrs["src"])
    path = folder / address
    kind = mimetypes.guess_type(path.name)[0] or ""
    try:
        local = path.resolve().is_relative_to(folder.resolve())
        small = local and path.is_file() and path.stat().st_size <= _LARGEST_PICTURE
        content = path.read_bytes() if small and kind.startswith("image/") else None
    except OSError:
        content = None
    if content is not None:
        image.attrSet("src", f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}")
        return
    image.type, image.tag = "text", ""
    image.content = f"[picture not included: {image.content} {address}]"
