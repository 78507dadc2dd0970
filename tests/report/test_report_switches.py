"""Chart switches in a browser: moving average, logarithmic axis, CSV download; the printed page."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

import pytest
from browser import Browser
from made_up_runs import make_run
from slowness import scaled

from ezpz_llm.report.chart import Axis, Series, chart
from ezpz_llm.report.document import page, report_page
from ezpz_llm.report.runs import load_runs

STEPS = range(1, 61)
PAPER = 718
"""Width of A4 between its margins, in pixels."""
LINE = "path[data-name]:not(.raw)"


def write_page(path: Path, *series: Series, log: bool = False) -> Path:
    """Write a page with one chart and return its path."""
    nats = Axis("nats", lambda value: f"{value:g}", log=log)
    path.write_text(page("t", "", [("Curves", chart("Loss, a=b", Axis("step"), nats, series))]))
    return path


def flip(browser: Browser, text: str) -> None:
    """Click the switch with that label in the first chart."""
    browser.evaluate(f"[...document.querySelectorAll('.switches label')]"
                     f".find(element => element.textContent.includes('{text}')).querySelector('input').click()")


def heights(browser: Browser, selector: str) -> list[float]:
    """Return the y coordinates of a line, upwards from 0 to 1000."""
    drawn = browser.evaluate(f"document.querySelector('{selector}').getAttribute('d')")
    return [1000 - float(pair.split()[1]) for pair in drawn.replace("M", "L").split("L")[1:]]


def ticks(browser: Browser) -> list[float]:
    """Return the visible tick labels of the y axis."""
    visible = "[...document.querySelectorAll('.ticks.y span')].filter(element => element.offsetHeight)"
    return [float(text) for text in browser.evaluate(f"{visible}.map(element => element.textContent)")]


@pytest.mark.timeout(180)
def test_moving_average_keeps_the_raw_line(browser, tmp_path):
    values = [10 + (-1) ** step for step in STEPS]
    browser.open(write_page(tmp_path / "a.html", Series("noisy", STEPS, values, 0)), 1440)
    raw = heights(browser, LINE)
    flip(browser, "moving average")
    assert heights(browser, ".raw") == raw
    smooth = heights(browser, LINE)
    total = weight = 0.0
    for height, drawn in zip(raw, smooth, strict=True):
        total, weight = 0.9 * total + 0.1 * height, 0.9 * weight + 0.1
        assert drawn == pytest.approx(total / weight, abs=0.02)
    assert max(smooth[20:]) - min(smooth[20:]) < (max(raw) - min(raw)) / 5
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.press("Home")
    assert browser.evaluate("document.querySelector('output').textContent") == "step 1: noisy 9"
    flip(browser, "moving average")
    assert heights(browser, LINE) == raw
    assert browser.evaluate("document.querySelectorAll('.raw').length") == 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("begins_log", [False, True])
def test_switch_between_log_and_linear_axis(browser, tmp_path, begins_log):
    values = [0.0 if step == 1 else None if step == 30 else 10.0 ** (step / 20) for step in STEPS]
    browser.open(write_page(tmp_path / "a.html", Series("steep", STEPS, values, 0), log=begins_log), 375)
    flips = 0 if begins_log else 1
    for _ in range(flips):
        flip(browser, "logarithmic")
    drawn = heights(browser, LINE)
    assert len(drawn) == 58, "a logarithmic axis omits zero and the gap"
    assert drawn[-1] - drawn[-2] == pytest.approx(drawn[1] - drawn[0], abs=0.05), "10^x is straight"
    assert ticks(browser) == [1, 3, 10, 30, 100, 300, 1000]
    flip(browser, "logarithmic")
    drawn = heights(browser, LINE)
    assert len(drawn) == 59 - begins_log
    assert drawn[-1] - drawn[-2] > 10 * (drawn[1] - drawn[0])
    assert ticks(browser)[-3:] == [600, 800, 1000]


@pytest.mark.timeout(180)
def test_download_points_as_csv(browser, tmp_path):
    names = ('a "quoted", name', "validation")
    noisy = [5.123456 - math.log(step) for step in STEPS]
    browser.open(write_page(tmp_path / "a.html", Series(names[0], STEPS, [*noisy[:-1], None], 0),
                            Series(names[1], [60], [4.5], 1, dots=True)), 1440)
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "got"))
    flip(browser, "moving average")
    browser.evaluate("document.querySelector('.switches button').click()")
    file, deadline = tmp_path / "got" / "loss-a-b.csv", time.monotonic() + scaled(30)
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with file.open(newline="") as lines:
        head, *rows = csv.reader(lines)
    assert head == ["series", "step", "nats"]
    assert [name for name, _, _ in rows] == [names[0]] * 59 + [names[1]]
    assert [int(step) for _, step, _ in rows] == [*STEPS[:-1], 60]
    assert [float(value) for *_, value in rows] == pytest.approx([*noisy[:-1], 4.5], abs=1e-5), "as written"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("width", [375, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_page_does_not_overflow(browser, tmp_path, width, dark):
    file = tmp_path / "page.html"
    runs = load_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=0.3)])
    file.write_text(report_page(runs))
    browser.open(file, width, dark=dark)
    fits = f"document.documentElement.scrollWidth <= Math.min(innerWidth, {width})"
    assert browser.evaluate(fits)
    for text in ("moving average", "logarithmic"):
        flip(browser, text)
        assert browser.evaluate(fits)
    visible_switches = "[...document.querySelectorAll('.switches')].filter(element => element.offsetHeight).length"
    assert browser.evaluate(visible_switches) == 3, "one for each visible chart"
    complaints = [message for message in browser.messages if message["method"] in (
        "Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")]
    assert complaints == []
    browser.open(file, width, dark=dark, script=False)
    assert browser.evaluate("document.querySelectorAll('.switches').length") == 0, "no switches without a script"


@pytest.mark.timeout(180)
def test_printed_page_has_charts_without_switches(browser, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(report_page(load_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", lr=0.3)])))
    browser.open(file, PAPER, dark=True)
    flip(browser, "moving average")
    browser.call("Emulation.setEmulatedMedia", media="print",
                 features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    visible_count = ("[...document.querySelectorAll('%s')]"
                     ".filter(element => element.getBoundingClientRect().height).length")
    assert browser.evaluate(visible_count % ".switches, .views > label, output") == 0
    assert browser.evaluate(visible_count % ".plot") == 3
    assert browser.evaluate(visible_count % ".raw") == 2
    assert browser.evaluate(f"document.documentElement.scrollWidth <= {PAPER}"), "nothing is cut off"
    bar = "getComputedStyle(document.querySelector('.bars i')).printColorAdjust"
    assert browser.evaluate(bar) == "exact", "browsers omit backgrounds otherwise"
    browser.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.timeout(180)
def test_switches_of_a_million_steps_use_the_drawn_points(browser, tmp_path):
    steps = range(1, 1_000_001)
    series = Series("long", steps, [2 + 3 / (1 + step / 1000) for step in steps], 0)
    file = write_page(tmp_path / "a.html", series)
    assert file.stat().st_size < 40_000
    browser.open(file, 1440)
    flip(browser, "moving average")
    flip(browser, "logarithmic")
    assert len(heights(browser, LINE)) == len(heights(browser, ".raw")) == 300
