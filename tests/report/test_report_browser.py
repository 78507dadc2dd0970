"""Pages in a browser: narrow screens and the dark preference. Requires chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import make_run
from slowness import scaled

from ezpz_llm.training.report.run_page import report_page
from ezpz_llm.training.report.runs import load_runs

pytestmark = [pytest.mark.full,
              pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")]

# A window cannot be narrower than 500 px, so the page is in a frame.
FRAME = """<!doctype html>
<iframe id="frame" style="border: 0; width: {width}px; height: 4000px" srcdoc="{page}"></iframe>
<pre id="result"></pre><script>onload = () => {{
  const page = frame.contentDocument, style = frame.contentWindow.getComputedStyle(page.documentElement)
  result.textContent = JSON.stringify({{
    width: page.documentElement.clientWidth, content: page.documentElement.scrollWidth,
    background: style.backgroundColor,
    images: [...page.images].map(image => image.clientWidth / image.naturalWidth),
    captions: [...page.querySelectorAll("figcaption")].map(part => part.getBoundingClientRect().right)}})
}}</script>"""
SMALLEST_TEXT_PX = 7 * 96 / 72


def measure(page: str, width: int, scheme: str, folder: Path) -> dict[str, Any]:
    """Return measurements of a page in a frame of this width; `scheme` is the preferred color scheme."""
    (folder / "frame.html").write_text(FRAME.format(width=width, page=html.escape(page)))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
               f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--dump-dom",
               (folder / "frame.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=True).stdout
    result = re.search('<pre id="result">(.+?)</pre>', shown)
    assert result, shown[:2000]
    return json.loads(html.unescape(result[1]))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    return report_page(load_runs([make_run(folder / name, config={"model": name})
                                  for name in ("a", "a-run-with-a-long-name" * 4)]))


@pytest.mark.parametrize("width", [375, 600, 1200])
def test_text_is_readable_and_nothing_is_cut_at_every_width(page: str, width: int, tmp_path: Path) -> None:
    shown = measure(page, width, "light", tmp_path)
    assert shown["content"] <= shown["width"], "only tables scroll sideways"
    assert max(shown["captions"]) <= shown["width"]
    assert min(shown["images"]) * SMALLEST_TEXT_PX > 9, shown["images"]


def test_page_follows_the_preferred_color_scheme(page: str, tmp_path: Path) -> None:
    schemes = {scheme: measure(page, 375, scheme, tmp_path)["background"] for scheme in ("light", "dark")}
    assert schemes == {"light": "rgba(0, 0, 0, 0)", "dark": "rgb(26, 26, 26)"}
