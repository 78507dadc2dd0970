"""Reports of studies as text, JSON, CSV and HTML, and comparisons of two studies."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure as Drawing
from msgspec.structs import replace
from pages import check_page, figure_text
from scale_laws import repeat, study
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.scale import main as scale_main
from ezpz_llm.verify.scaling.compare import compare, comparison_notes
from ezpz_llm.verify.scaling.efficiency import curves_of, points_of
from ezpz_llm.verify.scaling.findings import find
from ezpz_llm.verify.scaling.page import findings_page, scaling_figure
from ezpz_llm.verify.scaling.paper import write_paper
from ezpz_llm.verify.scaling.report_record import report_record
from ezpz_llm.verify.scaling.study import Point, Study, add_repeat
from ezpz_llm.verify.scaling.study_report import findings_text, report_main

SIZES = (1, 2, 4)


def ddp(mode, n, q, a):
    return 0.025 * q + 0.06 * (n - 1) / n + 0.004 * math.log2(n)


def zero3(mode, n, q, a):
    return 0.025 * q + 0.02 / n + 0.04 * a * (n - 1) / n


def make_study(folder: Path, *, slower: float = 1.0, layouts=("ddp", "zero3"), modes=("weak", "strong"),
               sizes=SIZES, torch: str = "2.13.0", seed: int = 0) -> Path:
    """Write the folder of a study with a failed run and a run left to run."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    repeats = []
    for name in layouts:
        law = ddp if name == "ddp" else zero3
        repeats += study(lambda *at, law=law: slower * law(*at), rng, modes=modes, sizes=sizes, ds_config=name)
    repeats[-1] = replace(repeats[-1], error="rank 1 was killed (code 137)", step_times_s=(),
                          tokens_per_second=None)
    points = {run.point: Point(run.point, run.mode, run.ds_config, run.nodes, run.ranks, run.global_batch,
                               run.micro_batch, run.accumulation, (), ("python3", "-m", "ezpz_llm.train"))
              for run in repeats}
    Study("nodes", 3, 0, ("ezpz-llm", "scale", "--nodes", "1,2,4"), str(folder), None, None,
          tuple(points.values()), ("a note of the study",)).write(folder)
    for run in repeats[1:]:
        seconds = float(np.median(run.step_times_s or (1.0,)))
        waits = 0.03 * (run.ranks - 1) / run.ranks
        split = {"compute": 0.8 * (seconds - waits), "exposed_communication": waits, "data": 0.001,
                 "optimizer": 0.2 * (seconds - waits) - 0.001, "other": 0.0}
        add_repeat(folder, replace(run, split=split if not run.error else None, mfu=0.41))
        run_dir = RunDir(folder / run.run_dir).create()
        write_json(run_dir.record, {
            "launch": {"typed": ["launch", "--hosts", f"n[1-{run.nodes}]", "python3", "-m", "ezpz_llm.train"],
                       "argv": ["mpiexec", "-n", str(run.ranks)], "env": {"OMP_NUM_THREADS": "1"}},
            "environment": {"versions": {"torch": torch}, "device": {"type": "cpu"},
                            "hosts": [f"n{i + 1}" for i in range(run.nodes)]}})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("study") / "scale-a<b>")


def test_terminal_report_is_complete(folder):
    text = findings_text(find(folder), 100, color=False)
    assert "\x1b" not in text
    for part in ("Weak scaling, ddp: 4 sequences of 256 tokens per step and device at every size",
                 "Strong scaling, zero3: 64 sequences of 256 tokens per step at every size",
                 "Layouts on 4 ranks on 4 nodes (strong), 64 sequences per step", "baseline", "95% interval",
                 "strong-zero3-n4-r4: 1 of 3 runs failed", "rank 1 was killed (code 137)", "exposed", "3 n4 (3/3)",
                 "weak scaling: efficiency (%) over nodes", "A weak ddp",
                 "Extrapolation, not measured: t(n) = single/n + limit (n-1)/n + doubling log2 n",
                 "weak ddp      16 nodes", "weak zero3: single ", "a note of the study", "1 run left to run",
                 "41.0%"):
        assert part in text, part
    assert max(map(len, text.splitlines())) < 130


def test_json_and_csv_agree(folder):
    command = [sys.executable, "-m", "ezpz_llm.scale", "report", str(folder), "--at", "8"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert run.returncode == 0, run.stderr
    assert str(folder / "report.html") in run.stdout
    record = json.loads((folder / "report.json").read_text())
    rows = {row["point"]: row for row in csv.DictReader((folder / "report.csv").open())}
    assert len(rows) == len(record["points"]) == 12
    for point in record["points"]:
        row = rows[point["point"]]
        assert float(row["step_time_s"]) == point["step_time_s"]
        assert point["step_time_low_s"] < point["step_time_s"] < point["step_time_high_s"]
        assert row["efficiency_low"] == "" or float(row["efficiency_low"]) < float(row["efficiency"])
        assert point["origin"]["commands"][0].startswith("launch --hosts 'n[1-")
        tokens = point["global_batch"] * 256
        assert point["tokens_per_second"] == pytest.approx(tokens / point["step_time_s"])
    assert record["runs_missing"] == 1
    assert [row["error"] for row in record["failed"]] == ["rank 1 was killed (code 137)"]
    assert [(fit["mode"], fit["ds_config"]) for fit in record["fits"]] == [
        (mode, name) for mode in ("weak", "strong") for name in ("ddp", "zero3")]
    for fit in record["fits"]:
        at, = fit["extrapolations"]
        assert (at["size"], at["ranks"]) == (8, 8)
        assert at["step_time_s"] == pytest.approx(
            fit["single_s"] / 8 + fit["limit_s"] * 7 / 8 + fit["doubling_s"] * 3)
        assert 0 <= fit["residual"] < 0.1
    assert record["not_extrapolated"] == []
    beyond = subprocess.run([*command[:-1], "17"], capture_output=True, text=True, timeout=scaled(60), check=False)
    assert beyond.returncode == 2
    assert "no extrapolation to 17 nodes: the study measured 1 to 4" in beyond.stderr
    # Twelve nodes are valid for the weak curve, but cannot divide a global batch of 64.
    text = findings_text(find(folder, at=(12,)), 200, color=False)
    assert "strong ddp at 12 nodes, strong zero3 at 12 nodes: a global batch of 64 cannot be divided" in text
    assert "12 nodes" in text
    wrong = subprocess.run([*command[:-1], "abc"], capture_output=True, text=True, timeout=scaled(60), check=False)
    assert (wrong.returncode, "'abc' is not a list of whole numbers such as 16,32" in wrong.stderr) == (2, True)


def test_report_names_missing_and_damaged_files(tmp_path):
    folder = make_study(tmp_path / "a")
    for run_dir in folder.glob("points/*-zero3-*/run-*"):
        shutil.rmtree(run_dir)
    lines = [line for line in (folder / "points.jsonl").read_text().splitlines()
             if '"weak-ddp-n1-r1"' not in line]
    failed = next(row for row in lines if '"weak-ddp-n2-r2"' in row).replace("weak-ddp-n2-r2", "weak-ddp-n1-r1")
    failed = {**json.loads(failed), "nodes": 1, "ranks": 1, "error": "no such device", "step_times_s": []}
    (folder / "points.jsonl").write_text("\n".join([*lines, json.dumps(failed), ""]))
    text = findings_text(find(folder), 200, color=False)
    assert "weak-ddp-n1-r1 has no good run: efficiencies are relative to weak-ddp-n2-r2" in text
    next(folder.glob("points/weak-ddp-n2/run-0/run.json")).write_text("{")
    with pytest.raises(UserError, match="this is not JSON"):
        find(folder)


def test_reports_of_one_and_two_sizes(tmp_path):
    layouts = findings_text(find(make_study(tmp_path / "one", modes=("strong",), sizes=(2,))), 100, color=False)
    assert "Layouts on 2 ranks on 2 nodes" in layouts
    assert "of fastest" in layouts
    assert "scaling:" not in layouts
    two = findings_text(find(make_study(tmp_path / "two", sizes=(1, 2))), 100, color=False)
    assert "weak ddp, weak zero3, strong ddp, strong zero3: no fit: it requires 3 sizes, and" in two
    assert "Extrapolation, not measured" not in two, "no table without rows"
    with pytest.raises(UserError, match="requires 3 sizes"):
        report_main([str(tmp_path / "two"), "--at", "8"])
    with pytest.raises(UserError, match="this is not a study"):
        find(tmp_path)


def test_report_without_good_runs_fails_with_their_error(tmp_path):
    folder = make_study(tmp_path / "a", layouts=("ddp",))
    lines = [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]
    (folder / "points.jsonl").write_text("".join(
        json.dumps({**line, "error": "no such device", "step_times_s": []}) + "\n" for line in lines))
    with pytest.raises(UserError, match="no run of the study succeeded: no such device"):
        find(folder)


def test_compare_two_studies(tmp_path, capsys):
    first = make_study(tmp_path / "first", layouts=("ddp",))
    second = make_study(tmp_path / "second", slower=1.2, layouts=("ddp",), torch="2.14.0", seed=1)
    comparison = compare(find(first), find(second))
    assert {pair.verdict for pair in comparison.pairs} == {"slower"}
    for pair in comparison.pairs:
        low, high = pair.speed_ratio.interval
        assert low - 0.02 < 1 / 1.2 < high + 0.02
    assert comparison.differences == {"torch": ("2.13.0", "2.14.0")}
    shares = comparison.pairs[1].efficiencies
    assert shares[0].value == pytest.approx(shares[1].value, rel=0.06)
    same = compare(find(first), find(make_study(tmp_path / "third", layouts=("ddp", "zero3"), seed=2)))
    assert [pair.verdict for pair in same.pairs].count("no difference shown") >= 4
    assert any(note.startswith("only in third: weak-zero3") for note in comparison_notes(same))
    with pytest.raises(UserError, match="no points in common"):
        compare(find(first), find(make_study(tmp_path / "other", layouts=("zero3",))))
    command = [sys.executable, "-m", "ezpz_llm.scale", "compare", str(first), str(second)]
    text, numbers = (subprocess.run([*command, *more], capture_output=True, text=True, timeout=scaled(60),
                                    check=True).stdout for more in ([], ["--json"]))
    assert "slower" in text
    assert json.loads(numbers)["differences"] == {"torch": ["2.13.0", "2.14.0"]}


def test_page_has_tables_figures_and_provenance(folder):
    page = findings_page(find(folder))
    figures = check_page(page)
    assert "a<b>" not in page, "names are escaped"
    for part in ("launch --hosts", "mpiexec -n 4", "ezpz-llm scale --nodes 1,2,4", "OMP_NUM_THREADS", "2.13.0",
                 "Environment of all points", "a note of the study"):
        assert part in page, part
    weak, strong, breakdown = figures.values()
    for figure in (weak, strong):
        texts = figure_text(figure)
        assert {"ddp", "zero3", "ideal", "nodes", "tokens/s", "efficiency (%)"} <= {*texts}
        assert [text for text in texts if text in ("1", "2", "3", "4")] == ["1", "2", "4"] * 2, "ticks at the sizes"
    assert {"weak-ddp-n4-r4", "compute", "exposed_communication"} <= {*figure_text(breakdown)}


def test_scaling_figure_has_intervals_and_ideal_line(folder):
    curves = [curve for curve in find(folder).curves if curve.mode == "strong"]
    throughput, efficiency = scaling_figure(curves).panels
    axes = Drawing().subplots(1, 2)
    throughput.draw(axes[0])
    efficiency.draw(axes[1])
    for panel_axes in axes:
        assert panel_axes.get_xscale() == "log"
        assert panel_axes.get_xticks().tolist() == [1, 2, 4]
        assert len(panel_axes.containers) == 2, "a layout each"
    curve, point = curves[0], curves[0].points[-1]
    ideal = next(line for line in axes[0].lines if line.get_label() == "ideal")
    assert ideal.get_ydata() == pytest.approx([curve.base.tokens_per_second * size for size in SIZES])
    estimate = curve.efficiency(point)
    _, _, (bars,) = axes[1].containers[0]
    drawn = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert drawn[0] == [100, 100], "the baseline has no interval"
    assert drawn[-1] == pytest.approx([100 * end for end in estimate.interval])
    _, _, (bars,) = axes[0].containers[0]
    fast, slow = point.step_time.interval
    assert bars.get_segments()[-1][:, 1] == pytest.approx([64 * 256 / slow, 64 * 256 / fast])


def test_paper_writes_figure_and_table(folder, tmp_path):
    assert scale_main(["paper", str(folder), "--out", str(tmp_path / "a"), "--width", "3.35"]) == 0
    names = {f"scaling-{mode}.{form}" for mode in ("weak", "strong") for form in ("pdf", "svg", "png", "tex")}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    drawing = xml.parse(tmp_path / "a" / "scaling-weak.svg").getroot()
    assert float(drawing.get("width").removesuffix("pt")) == pytest.approx(3.35 * 72)
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}use"))) > 6  # a marker for each point
    assert (tmp_path / "a" / "scaling-weak.pdf").read_bytes().startswith(b"%PDF")
    assert b"/Type3" not in (tmp_path / "a" / "scaling-weak.pdf").read_bytes()

    findings = find(folder)
    rows = {row.point: row for row in report_record(findings).points}
    table = (tmp_path / "a" / "scaling-strong.tex").read_text()
    lines = [line for line in table.splitlines() if "% points/" in line]
    assert len(lines) == 6
    for line in lines:
        cells, name = line.split(r" \\ % points/")
        ds_config, size, ranks, step, speed, efficiency, mfu = cells.split(" & ")
        row = rows[name]
        assert (ds_config, int(size), int(ranks)) == (row.ds_config, row.nodes, row.ranks)
        assert float(step) == pytest.approx(1e3 * row.step_time_s, abs=0.06)
        assert int(speed.replace(",", "")) == round(row.tokens_per_second)
        assert efficiency == ("baseline" if row.nodes == 1 else f"{100 * row.efficiency:.1f} "
                              f"[{100 * row.efficiency_low:.1f}, {100 * row.efficiency_high:.1f}]")
        assert mfu == "41.0"

    again = write_paper(findings, tmp_path / "b", 3.35)
    assert all(path.read_bytes() == (tmp_path / "a" / path.name).read_bytes() for path in again)


def test_paper_requires_two_sizes(tmp_path):
    folder = make_study(tmp_path / "one", sizes=(1,))
    with pytest.raises(UserError, match="no layout measured at two sizes"):
        scale_main(["paper", str(folder)])
    assert not (folder / "paper").exists()


def test_without_matplotlib_a_report_has_no_page_and_a_paper_is_rejected(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    make_study(tmp_path / "study", layouts=("ddp",))
    assert report_main([str(tmp_path / "study")]) == 0
    assert ("page: not written: the page requires matplotlib, which is not installed: pip install "
            "'ezpz_llm[figures]'\n") in capsys.readouterr().out
    assert (tmp_path / "study/report.json").exists()
    assert (tmp_path / "study/report.csv").exists()
    assert not (tmp_path / "study/report.html").exists()
    with pytest.raises(UserError, match="a figure requires matplotlib") as caught:
        scale_main(["paper", "nowhere", "--out", str(tmp_path / "a")])
    assert "pip install 'ezpz_llm[figures]'" in str(caught.value)
    assert not (tmp_path / "a").exists()


def make_noisy_study(folder: Path) -> Path:
    """Write a study on one node in which one run on two ranks took 18 times as long as its repeat."""
    folder.mkdir()
    repeats = [repeat("weak", ranks, number, nodes=1, ds_config=ds_config,
                      steps=[0.1 * (1 + 17 * (ranks == 2) * number)] * 20)
               for ds_config in ("ddp", "zero2") for ranks in (1, 2, 4) for number in range(2)]
    points = {run.point: Point(run.point, run.mode, run.ds_config, 1, run.ranks, run.global_batch,
                               run.micro_batch, run.accumulation, (), ("python3", "-m", "ezpz_llm.train"))
              for run in repeats}
    Study("ranks", 2, 0, ("ezpz-llm", "scale"), str(folder), None, None, tuple(points.values()), ()).write(folder)
    for run in repeats:
        add_repeat(folder, run)
    return folder


def test_an_interval_that_is_too_wide_is_neither_drawn_nor_written(tmp_path):
    folder = make_noisy_study(tmp_path / "study")
    findings = find(folder)
    assert "too wide" in findings_text(findings, 200, color=False)
    assert scale_main(["paper", str(folder)]) == 0
    table = (folder / "paper/scaling-weak.tex").read_text()
    assert "layout & ranks & step (ms)" in table, "no column twice"
    assert [row.count("&") for row in table.splitlines() if "points/" in row] == [5] * 6
    assert table.count(" [too wide] ") == 2
    for axes_points in figure_values(scaling_figure(findings.curves)):
        low, high = axes_points
        assert high < 100 * low, "axes fit the values"
    for row in report_record(findings).points:
        for low, high in ((row.step_time_low_s, row.step_time_high_s), (row.efficiency_low, row.efficiency_high)):
            assert (low is None) == (high is None)
            assert low is None or high <= 10 * low
    pairs = {pair.first.name: pair for pair in compare(findings, findings).pairs}
    wide = pairs["weak-ddp-n1-r2"]
    assert (wide.speed_ratio.interval, wide.verdict) == (None, "no difference shown")


def figure_values(figure):
    """Return the smallest and the largest y of each panel's points and error bars."""
    for panel in figure.panels:
        axes = Drawing().subplots()
        panel.draw(axes)
        values = [float(y) for container in axes.containers for segment in container[2][0].get_segments()
                  for y in segment[:, 1]]
        yield min(values), max(values)


def test_layouts_with_other_sizes_share_one_axis():
    """The points of zero2 are on one node, so its curve is over ranks, and that of ddp is over nodes."""
    repeats = [repeat("weak", ranks, 0, nodes=nodes, ds_config=name)
               for name, placements in (("ddp", ((1, 4), (2, 8))), ("zero2", ((1, 2), (1, 4))))
               for nodes, ranks in placements]
    first, second = curves = curves_of(points_of(repeats))
    assert (first.unit, second.unit) == ("nodes", "ranks")
    throughput, _ = scaling_figure(curves).panels
    assert throughput.x_label == "ranks"
    axes = Drawing().subplots()
    throughput.draw(axes)
    assert axes.get_xticks().tolist() == [2, 4, 8]
