"""Reports of runs that finished, resumed, changed their batch, ended early or are still running."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from made_up_runs import make_run
from slowness import scaled
from well_formed import check_balance

from ezpz_llm.base.errors import UserError
from ezpz_llm.report.__main__ import main, report_text
from ezpz_llm.report.chart import Axis, Series, chart
from ezpz_llm.report.document import report_page
from ezpz_llm.report.runs import comparison_sentence, differences, load_runs
from ezpz_llm.rundir import RunDir, write_json


def test_results_of_finished_run(tmp_path):
    run, = load_runs([make_run(tmp_path / "a")])
    assert run.state == "finished, step 100 of 100"
    assert run.notes == ()
    assert run.tokens[-1] == 204800
    assert run.hours[-1] == pytest.approx(10 / 3600)
    assert run.validation == (100, pytest.approx(3.1))
    assert run.last_loss == pytest.approx(5.004 - 0.02 * 95.5)
    assert run.median("tokens_per_second_per_device") == pytest.approx(10240)


@pytest.mark.parametrize(("record", "silent_s", "state"), [
    ({}, 5, "running, step 40 of 100 written 5 s ago"),
    ({}, 7500, "no exit recorded; step 40 of 100 was written 2 hours ago"),
    ({"exit": {"code": 137, "cause": "out of memory", "ended": 2000.0}}, 5,
     "failed after step 40 of 100: out of memory (code 137)"),
    ({"exit": {"code": 0, "cause": "all ranks succeeded", "ended": 2000.0}, "steps": 40,
      "stopped": "SIGTERM was received"}, 5, "stopped after step 40 of 100: SIGTERM was received"),
    ({"exit": {"code": 130, "cause": "launch received SIGINT (Ctrl-C) and ended the run", "ended": 2000.0,
               "stopped": {"kind": "signal"}}, "steps": 40, "stopped": "interrupted by Ctrl-C (SIGINT)"}, 5,
     "stopped after step 40 of 100: interrupted by Ctrl-C (SIGINT)"),
    # There is no checkpoint to resume from.
    ({"exit": {"code": 143, "cause": "launch received SIGTERM", "ended": 2000.0, "stopped": {"kind": "signal"}}}, 5,
     "failed after step 40 of 100: launch received SIGTERM (code 143)"),
    # The exit is from an earlier attempt; launch has restarted the run since.
    ({"exit": {"code": 137, "cause": "out of memory", "ended": 900.0}, "steps": 20, "stopped": "SIGTERM"}, 5,
     "running, step 40 of 100 written 5 s ago"),
])
def test_state_of_run(tmp_path, record, silent_s, state):
    folder = make_run(tmp_path / "a", range(1, 41), **record)
    os.utime(folder / "metrics.jsonl", (5000, 5000))
    run, = load_runs([folder], now=5000 + silent_s)
    assert run.state == state


def test_text_report_fits_the_terminal(tmp_path):
    runs = load_runs([make_run(tmp_path / "a", range(1, 41), exit={
        "code": 1, "cause": "rank 3 on a-node-with-a-long-name raised an error of many words " * 3,
        "ended": 2000.0}),
                      make_run(tmp_path / "b", lr=0.002)])
    assert max(map(len, report_text(runs, 80, color=False).splitlines())) <= 80


def test_state_of_interrupted_run_with_checkpoint(tmp_path):
    folder = make_run(tmp_path / "a", range(1, 41), exit={
        "code": 143, "cause": "launch received SIGTERM", "ended": 2000.0, "stopped": {"kind": "signal"}})
    (folder / "checkpoints/latest").write_text("step-00000030\n")
    run, = load_runs([folder])
    assert run.state == "stopped after step 40 of 100: launch received SIGTERM"


def test_notes_on_resumed_batch_missing_steps_and_nan(tmp_path):
    folder = make_run(tmp_path / "a", range(11, 21))
    make_run(folder, range(21, 31), tokens=4096, config={"steps": 100, "resume": "runs/first", "log_every": 10})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "loss": null, "step_time_s": 0.1, "tokens_per_second": 40960}\n')
        file.write('{"step": 33, "loss": 4.0, "step_time_s": 0.1, "tokens_per_second": 40960}\n{"step": 34, "lo')
    run, = load_runs([folder])
    assert run.tokens[0] == 11 * 2048, "includes steps before the first line"
    assert run.tokens[-1] == 20 * 2048 + 12 * 4096
    notes = " ".join(run.notes)
    for part in ("begin at step 11 (resumed from runs/first)",
                 "the tokens per step change from 2,048 to 4,096 at step 21", "1 step between",
                 "non-finite at 1 step, first at step 31"):
        assert part in notes
    assert "No data yet" not in report_page([run])
    assert "loss (nats/token)" in report_text([run], 80, color=False)


def test_repeated_steps_count_once(tmp_path):
    folder = make_run(tmp_path / "a", [1, 2, 3, 2, 3, 4])
    run, = load_runs([folder])
    assert run.column("step").tolist() == [1, 2, 3, 4]
    assert run.tokens[-1] == 4 * 2048


def test_several_differing_settings_are_flagged_without_derived_ones(tmp_path):
    """Trap 65: comparing runs that differ in several settings."""
    first, = load_runs([make_run(tmp_path / "a")])
    same, other = load_runs([make_run(tmp_path / "b"), make_run(tmp_path / "c", lr=0.002)])
    assert comparison_sentence(differences([first, same])) == "The runs have the same settings."
    one_setting = differences([first, other])
    assert one_setting == {"lr": ["0.004", "0.002"]}, "min_lr is derived from lr"
    assert comparison_sentence(one_setting) == "The runs differ in one setting: lr."
    third, = load_runs([make_run(tmp_path / "d", lr=0.002, precision="bf16")])
    two_settings = differences([first, third])
    assert set(two_settings) == {"lr", "precision"}
    assert comparison_sentence(two_settings).startswith("warning: the runs differ in 2 settings (lr, precision)")
    assert "warning: the runs differ in 2 settings" in report_text([first, third], 80, color=False)
    assert 'class="warning"' in report_page([first, third])


def test_names_are_short_and_unique_and_duplicates_are_ignored(tmp_path):
    folders = [make_run(tmp_path / parts, range(1, 3)) for parts in ("x/run", "y/run")]
    assert [run.name for run in load_runs([*folders, folders[0]])] == ["x/run", "y/run"]
    assert [run.name for run in load_runs(folders[:1])] == ["run"]


def test_memory_of_many_steps(tmp_path):
    """Reading a million lines must fit into 300 MB: 200 bytes per line, a fifth of a dict."""
    folder = make_run(tmp_path / "a", range(1, 5))
    line = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    count = 20_000
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(line.replace('"step": 4', f'"step": {step}') + "\n" for step in range(1, count + 1))
    tracemalloc.start()
    run, = load_runs([folder])
    report_text([run], 80, color=False)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(run.rows) == count
    assert peak_bytes < 200 * count + 20e6


def test_invalid_run_directories(tmp_path):
    make_run(tmp_path / "runs" / "a", range(1, 3))
    with pytest.raises(UserError, match="not a run directory") as error:
        load_runs([tmp_path / "runs"])
    assert error.value.instead == f"ezpz-llm report {tmp_path / 'runs' / 'a'}"
    damaged = make_run(tmp_path / "b", range(1, 3))
    (damaged / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match="this is not JSON") as error:
        load_runs([damaged])
    assert error.value.where.endswith("metrics.jsonl, line 2, column 1")
    (damaged / "metrics.jsonl").write_text('{"step": 1}\n{"loss": 2}\n')
    with pytest.raises(UserError, match="step record 2 is invalid"):
        load_runs([damaged])
    RunDir(tmp_path / "empty").create()
    write_json(tmp_path / "empty" / "run.json", {"launch": {"typed": []}})
    with pytest.raises(UserError, match="no step has been written yet"):
        main([str(tmp_path / "empty")])


def test_command_prints_report_and_writes_page(tmp_path):
    folders = [make_run(tmp_path / name, range(1, last), lr=lr) for name, last, lr in
               (("first", 101, 0.004), ("second", 61, 0.5))]
    command = [sys.executable, "-m", "ezpz_llm.report", *map(str, folders), "--html", "page.html"]
    begin = time.monotonic()
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60), check=False,
                         env={**os.environ, "COLUMNS": "90"})
    assert run.returncode == 0, run.stderr
    assert time.monotonic() - begin < scaled(20)
    assert "\x1b" not in run.stdout
    drawn = run.stdout.split("loss (nats/token)")[1]
    assert {"A", "B"} <= set(drawn.split("tokens/s")[0]), "each run has its letter"
    assert "  A first\n  B second\n" in run.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "page.html", "second"]
    page = (tmp_path / "page.html").read_text()
    assert re.findall(r"""(?:src|href)=|url\(|@import|https?:""", page) == [], "no external resources"
    unwritable = subprocess.run([*command[:-1], "nowhere/page.html"], cwd=tmp_path, capture_output=True, text=True,
                                timeout=scaled(60), check=False)
    assert unwritable.returncode == 2
    assert "--html nowhere/page.html" in unwritable.stderr


def test_page_escapes_run_names(tmp_path):
    runs = load_runs([make_run(tmp_path / name, range(1, 5)) for name in ('<script>alert("1")&', "b")])
    page = report_page(runs)
    check_balance(page)
    assert "<script>alert" not in page


def test_page_escapes_invisible_characters(tmp_path):
    """An unescaped lone surrogate could not be encoded."""
    run = make_run(tmp_path / "a", range(1, 5), config={"model": "left\u202etfel \ud800 \x1b[31mred"})
    page = report_page(load_runs([run]))
    assert r"left\u202etfel \ud800 red" in page
    assert page.encode()


def test_page_allows_only_its_own_script(tmp_path):
    page = report_page(load_runs([make_run(tmp_path / "a", range(1, 5))]))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    for element, directive in (("script", "script-src"), ("style", "style-src-elem")):
        texts = re.findall(f"<{element}>(.*?)</{element}>", page, re.DOTALL)
        assert len(texts) == 1
        digest = base64.b64encode(hashlib.sha256(texts[0].encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert "unsafe-inline" not in re.sub(r"style-src 'unsafe-inline';", "", policy)


def test_chart_with_gaps_long_series_and_log_axis():
    long = Series("long", range(5000), [None if 2000 <= i < 3000 else i / 5000 + 1 for i in range(5000)], 0)
    drawn = chart("t", Axis("x"), Axis("y"), [long])
    path = re.search(r'data-name="long" d="([^"]*)"', drawn)[1]
    assert path.count("M") == 2, "one gap"
    assert 150 < len(re.findall("[ML]", path)) <= 300
    log = chart("t", Axis("x"), Axis("y", log=True), [Series("log", [1, 2, 3, 4], [0, 1, 100, 10000], 1)])
    path = re.search(r'data-name="log" d="([^"]*)"', log)[1]
    heights = [float(pair.split()[1]) for pair in re.findall(r"[ML]([\d. ]+)", path)]
    assert len(heights) == 3, "a logarithmic axis omits zero"
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.02)
    assert "No data yet" in chart("t", Axis("x"), Axis("y"), [Series("none", [1], [None], 0)])
    assert "d3" in chart("t", Axis("x"), Axis("y"), [Series("many", [1], [1], 11), Series("b", [1], [2], 3)])


CONTRAST = """(() => {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  const against = colour => {
    const own = light(colour);
    return (Math.max(own, paper) + .05) / (Math.min(own, paper) + .05) };
  const words = [...document.querySelectorAll("body, .faint, figcaption, .unit, caption, summary, td, label")];
  const lines = [...document.querySelectorAll("path.line, path.dots")];
  return [Math.min(...words.map(element => against(getComputedStyle(element).color))),
          Math.min(...lines.map(element => against(getComputedStyle(element).stroke)))];
})()"""


@pytest.mark.timeout(180)
def test_page_in_browser(browser, tmp_path):
    runs = load_runs([make_run(tmp_path / f"run-{i}", lr=0.1 * i) for i in range(1, 10)])
    page = tmp_path / "page.html"
    page.write_text(report_page(runs))
    for width, dark in ((1200, False), (1200, True), (360, False), (360, True)):
        browser.open(page, width, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, "no overflow"
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == \
            ("rgb(21, 25, 30)" if dark else "rgb(255, 255, 255)")
        words, lines = browser.evaluate(CONTRAST)
        assert words >= 4.5, "WCAG 2.2 AA: text"
        assert lines >= 3, "WCAG 2.2 AA: graphics"
        smallest = browser.evaluate("Math.min(...[...document.querySelectorAll('.ticks span, td, label')]"
                                    ".map(element => parseFloat(getComputedStyle(element).fontSize)))")
        assert smallest >= 12, "text keeps its size on a narrow screen"
        overlaps = browser.evaluate("""[...document.querySelectorAll(".ticks.x")].filter(axis => {
            const boxes = [...axis.children].map(tick => tick.getBoundingClientRect()).filter(box => box.width);
            return boxes.some((box, i) => i && box.left < boxes[i - 1].right); }).length""")
        assert overlaps == 0, "tick labels do not overlap"

    visible = "[...document.querySelectorAll('#loss0 ~ .panel')].map(element => element.offsetHeight > 0)"
    assert browser.evaluate(visible) == [True, False, False, False]
    browser.evaluate("document.querySelector('#loss0').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate(visible) == [False, True, False, False], "the keyboard switches views"
    browser.evaluate("[...document.querySelectorAll('.plot')].find(element => element.offsetHeight).focus()")
    browser.press("Home")
    text = browser.evaluate("[...document.querySelectorAll('output')].map(element => element.textContent).join('')")
    assert text.startswith("step 1: run-1 5.08, run-2 5.18"), "the cursor reads the recorded values"

    requests = {message["params"]["request"]["url"].split(":")[0] for message in browser.messages
                if message["method"] == "Network.requestWillBeSent"}
    assert requests == {"file"}
    complaints = [message for message in browser.messages
                  if message["method"] in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")]
    assert complaints == []
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    names = [node["name"]["value"] for node in tree if node.get("role", {}).get("value") in ("image", "img")]
    assert any(re.match(r"Training loss.*run-1: 5\.\d+ at first, 3\.\d+ at the end", name) for name in names)

    browser.open(page, 360, script=False)
    assert browser.evaluate("document.querySelector('.plot').tabIndex") == -1
    assert browser.evaluate("document.querySelector('.plot path.line').getBoundingClientRect().height") > 100
    browser.evaluate("document.querySelector('label[for=loss2]').click()")
    assert browser.evaluate(visible) == [False, False, True, False], "charts and views work without scripts"


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib (extra figures)")
def test_write_figures(tmp_path, capsys):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", range(1, 41), lr=0.3))]
    assert main([*runs, "--figures", str(tmp_path / "figures")]) == 0
    written = [str(tmp_path / "figures" / f"curves.{form}") for form in ("pdf", "svg", "png")]
    assert "figures: " + ", ".join(written) in capsys.readouterr().out
    assert Path(written[0]).read_bytes().startswith(b"%PDF")
    assert b"/Type3" not in Path(written[0]).read_bytes()
    assert Path(written[2]).read_bytes()[16:20] == int(6.9 * 300).to_bytes(4, "big")  # width in a PNG's header
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        main([*runs, "--figures", str(tmp_path / "file")])
