"""The report's page: one file, no network access, no foreign HTML."""

import re
import shutil
import subprocess

import pytest

from ece408_op.report import make, page, rendering
from ece408_op.report.ladder import Gain
from ece408_op.report.spread import Spread

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def _page(markdown, folder):
    return page.render(markdown, "A title", folder)


@pytest.fixture
def made(drawing_player, options, tmp_path):
    drawing_player.gpu = True
    make.make(options, tmp_path)
    return tmp_path / "report.html"


def test_it_is_one_file(made):
    html = made.read_text()
    assert html.count('src="data:image/svg+xml;base64,') == 8
    assert set(re.findall(r'(?:src|href)="([^"#:]*)[":]', html)) <= {"data", ""}
    assert "default-src 'none'" in html


def test_headings_are_linked(tmp_path):
    html = _page("# T\n\n## A: b & <c>\n\n## A: b & <c>\n", tmp_path)
    for address in ("1-a-b-c", "2-a-b-c"):
        assert f'<li><a href="#{address}">A: b &amp; &lt;c&gt;</a></li>' in html
        assert f'<h2 id="{address}">' in html


def test_html_in_the_text_stays_text(tmp_path):
    script = "<script>alert(1)</script>"
    html = _page(f"{script}\n\n`{script}`\n\n{rendering.block(script)}\n", tmp_path)
    assert script not in html
    assert html.count("&lt;script&gt;") == 3


def test_folds_tables_and_pictures(tmp_path):
    (tmp_path / "a.png").write_bytes(b"pixels")
    fold = "<details><summary>`a` & <b></summary>\n\n```text\n</details>\n```\n\n</details>"
    html = _page(f"# T\n\n![A](a.png)\n\n## S\n\n{fold}\n\n| a |\n| ---: |\n| 1 |\n", tmp_path)
    assert "<details><summary><code>a</code> &amp; &lt;b&gt;</summary>\n<div" in html
    assert html.count("</details>") == 1
    assert "&lt;/details&gt;\n</code></pre></div>\n</details>" in html
    scrolls = '<div class="scroll" tabindex="0">'
    for wide in ("<img ", "<pre>", "<table>"):
        assert f"{scrolls}{wide}" in html
    assert '<td style="text-align:right">1</td>' in html
    header = html[html.index("<header>") : html.index("</header>")]
    assert "<h1>T</h1>" in header
    assert "<img " in header
    assert "<h2" not in header


def test_a_block_holds_whatever_it_is_given(tmp_path):
    text = "```\n# no heading\n````\n| a |"
    html = _page(rendering.block(text), tmp_path)
    assert f'<pre><code class="language-text">{text}\n</code></pre>' in html


def test_a_students_picture_is_taken_in(tmp_path):
    (tmp_path / "mine.png").write_bytes(b"pixels")
    assert 'src="data:image/png;base64,cGl4ZWxz"' in _page("![Mine](mine.png)", tmp_path)


@pytest.mark.parametrize(
    "address", ["https://example.org/x.png", "missing.png", "../outside.png", "text.txt"]
)
def test_what_is_no_picture_here_is_not_fetched(tmp_path, address):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside.png").touch()
    (folder / "text.txt").touch()
    html = _page(f"![Mine]({address})", folder)
    assert "<img" not in html
    assert f"[picture not included: Mine {address}]" in html


def test_text_that_is_no_markdown_is_shown_as_it_is(tmp_path):
    text = "__constant__ a*b*c in 4_im2col.cu <x> [y](z) \\* _w_"
    assert f"<p>{text}</p>".replace("<x>", "&lt;x&gt;") in _page(rendering.prose(text), tmp_path)
    table = f"| a |\n| --- |\n| {rendering.cell(text + ' | d')} |"
    assert f"<td>{text} | d</td>".replace("<x>", "&lt;x&gt;") in _page(table, tmp_path)
    assert "<code>a*b*</code> *" in _page(rendering.prose("`a*b*` *"), tmp_path)


def test_values_of_cells():
    assert rendering.cell("a | b\nc") == "a \\| b c"
    assert [rendering.ms(each) for each in (None, 0.1234, 12.34, 123.4)] == [
        *("", "0.123", "12.3", "123")
    ]
    assert [rendering.gain(each) for each in (None, Gain(1.256, "a_b"))] == ["", "1.26x over a_b"]
    spreads = [Spread.of(samples) for samples in ([], [2.0], [1.0, 2.0, 4.0])]
    assert [rendering.spread(each) for each in spreads] == ["", "2.000", "2.000 (1.500 to 3.000)"]
    assert rendering.spread(spreads[1], single=True) == "2.000 (1 run)"
    assert rendering.spread(spreads[2], places=1) == "2.0 (1.5 to 3.0)"


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_opens_it_without_errors(made, tmp_path, dark):
    picture = tmp_path / "screen.png"
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    run = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,1200",
         "--enable-logging=stderr", *scheme, f"--screenshot={picture}", made.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert picture.is_file(), run.stderr
    assert "CONSOLE" not in run.stderr
    import matplotlib.image

    ground = matplotlib.image.imread(picture)[5, 5, :3].mean()
    assert ground < 0.2 if dark else ground > 0.9


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_that_errors_would_be_seen(tmp_path, written):
    """The test above relies on this: the console's errors appear on stderr."""
    path = written(
        "wrong.html",
        page.render("text", "t", tmp_path).replace("text", '<img src="https://example.org/x.png">'),
    )
    run = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 's.png'}",
         path.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" in run.stderr
