"""HTML page and figures of `explain`: complete, and safe with untrusted run directories."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from html import escape, unescape
from pathlib import Path

import pytest
from made_up_runs import make_run
from made_up_traces import MadeUp, of_all
from pages import check_page, figure_text
from slowness import scaled

from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.training.observe.tables import Table
from ezpz_llm.verify.explain import tables
from ezpz_llm.verify.explain.command import main
from ezpz_llm.verify.explain.diagnosis import diagnose
from ezpz_llm.verify.explain.page import explain_page

LAYOUT = {"name": "zero1", "engine": "deepspeed", "zero_stage": 1}
BATCH = {"global_batch": 16, "micro_batch": 4, "accumulation": 1, "dp_size": 4}
MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_size": 257}
WALL = {"set-up": 3.0, "training": 10.0, "logging": 0.1, "checkpoints": 0.4, "evaluation": 1.0, "sampling": 0.0,
        "other": 0.2}
MEMORY = {"expected": {"parameters": 4e6, "gradients": 4e6, "optimizer": 8e6, "activations": 3e7},
          "elsewhere": {}, "measured": {"parameters": 4_000_000, "gradients": 4_000_000, "optimizer": 8_000_000},
          "peak": 500_000_000}


def traced_run(folder: Path, ranks: int = 4, host: str = "node{}", **record: object) -> Path:
    """Write a run of two traced steps; the last rank takes 30 ms longer, and half of a collective is hidden."""
    make_run(folder, model=MODEL, memory=MEMORY, summary={"wall": WALL, "ceiling_share": 0.07},
             **{"environment": {"world_size": ranks}, **record})
    write_json(RunDir(folder).layout, {"layout": LAYOUT, "batch": BATCH, "precision": "fp32"})
    write_json(RunDir(folder).profile / "host.json", {"torch": 3.0, "deepspeed": 1.0})
    for rank in range(ranks):
        trace = MadeUp(rank, [of_all("all_reduce", [*range(ranks)]), of_all("all_gather", [*range(ranks)])],
                       host=host.format(rank))
        for number in (1, 2):
            begin, late = 200.0 * number, 30.0 * (rank == ranks - 1)
            trace.mark(f"step {number}", begin, 112)
            for phase, start, length in (("data", 0, 1), ("forward", 1, 20 + late),
                                         ("backward", 21 + late, 80 - late), ("optimizer", 101, 10)):
                trace.mark(phase, begin + start, length)
            trace.op(begin + 1, 40 + late)
            trace.collective("allreduce_", "all_reduce", begin + 36 + late, 50 - late)
            trace.op(begin + 90, 10)
            trace.collective("_allgather_base_", "all_gather", begin + 101, 5)
            trace.op(begin + 106, 5)
        with gzip.open(RunDir(folder).trace(rank), "wt") as file:
            json.dump(trace.whole(), file)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced_run(tmp_path_factory.mktemp("runs") / "traced")


@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_shares_of_a_run_with_several_attempts_add_up_to_at_most_100_percent(tmp_path, attempts, is_traced):
    """A wait for data also makes steps vary: without a limit, both added up to 136 %."""
    layout = RunDir(traced_run(tmp_path / "run", ranks=2))
    steps = [json.loads(line) for line in layout.metrics.read_text().splitlines()]
    for line in steps:
        line["data_s"] = 0.9 * line["step_time_s"]
        line["data_s"], line["step_time_s"] = (value * (1 + line["step"] % 3) for value in
                                               (line["data_s"], line["step_time_s"]))
    layout.metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
    first = len(steps) - len(steps) // attempts
    training = sum(line["step_time_s"] for line in steps[first:])
    record = json.loads(layout.record.read_text())
    record["summary"] = {"first_step": first, "steps": len(steps), "wall": {"set-up": 1.0, "training": training}}
    write_json(layout.record, record)
    if not is_traced:
        for rank in (0, 1):
            layout.trace(rank).unlink()
    causes = diagnose(layout.path).causes
    assert len(causes) > 1
    assert sum(cause.share for cause in causes) <= 1 + 1e-9
    assert all(cause.seconds <= training for cause in causes)


def test_the_page_has_everything_that_the_text_has(run, tmp_path, capsys):
    page_file = tmp_path / "explain.html"
    assert main([str(run), "--html", str(page_file)]) == 0
    text, page = capsys.readouterr().out, page_file.read_text()
    assert text.endswith(f"\npage: {page_file}\n")
    figures = check_page(page)
    assert list(figures) == ["Parts of a traced step", "Time in flight per step, mean over ranks",
                             "Memory, each kind on the rank that uses most of it", "Wall time of rank 0"]
    assert {"mean over ranks", "rank 3 on node3", "exposed, waiting"} <= \
        {*figure_text(figures["Parts of a traced step"])}
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == ["Causes of lost time", "Traced steps", "Collectives", "Ranks", "Memory",
                        "Cross-checks with other tools", "Wall time of the run"]
    diagnosis = diagnose(run)
    shown: list[Table] = [tables.traced_steps_table(diagnosis.split), tables.collectives_table(diagnosis.split),
                          tables.ranks_table(diagnosis.split), tables.memory_table(diagnosis.memory),
                          tables.run_table(diagnosis.wall)]
    for table in shown:
        for row in (table.columns, *table.rows, *([table.footer] if table.footer else [])):
            assert all(f">{escape(cell)}</t" in page for cell in row), row
            assert all(cell in text for cell in row), row
    page_text = " ".join(re.sub("<[^>]*>", " ", unescape(page)).split())
    lines = [f"{cause.share:.1%}, {cause.seconds:.2f} s {cause.what}" for cause in diagnosis.shown_causes]
    assert diagnosis.causes[0].kind == "slow_rank"
    places = [page_text.index(line) for line in lines]
    assert places == sorted(places), "the most expensive cause comes first"
    assert all(f"Try: {line}" in page_text for cause in diagnosis.shown_causes for line in cause.advice)


def test_the_bars_of_a_step_add_up_to_its_length(run):
    split = diagnose(run).split
    names, drawn = zip(*tables.step_bars(split), strict=True)
    assert names == ("mean over ranks", *(f"rank {rank} on node{rank}" for rank in range(4)))
    for parts, rank in zip(drawn[1:], split.ranks, strict=True):
        assert sum(parts.values()) == pytest.approx(rank.step_s)
        assert sum(parts.values()) - parts["exposed, waiting"] == pytest.approx(rank.own_s)
    assert drawn[1]["exposed, waiting"] == pytest.approx(0.025), "of 30 ms, 5 are hidden by operators"
    assert drawn[4]["exposed, waiting"] == pytest.approx(0)
    (reduce, parts), *_ = tables.collective_bars(split)
    assert reduce == "all_reduce (dp)"
    assert parts["hidden by computation"] > 0
    in_flight = sum(exposed.in_flight_s for rank in split.ranks for exposed in rank.exposed
                    if exposed.label == reduce)
    assert sum(parts.values()) == pytest.approx(in_flight / 8)


def test_the_page_of_a_run_without_traces_shows_its_step_times(tmp_path):
    run = make_run(tmp_path / "a", model=MODEL, summary={"wall": dict.fromkeys(WALL, 0.0)})
    write_json(RunDir(run).layout, {"layout": LAYOUT, "batch": BATCH, "precision": "fp32"})
    page = explain_page(diagnose(run))
    check_page(page)
    assert re.findall("<h2>(.*?)</h2>", page) == ["Causes of lost time", "Step time", "Wall time of the run"]
    assert "run with --trace-steps 10" in page
    assert "nan" not in page


EVIL = '<img src=x onerror="pwned=1"><script>pwned=1</script>\u202e\x1b[31m\ud800$\\frac\'"&'


def test_content_of_an_untrusted_run_is_escaped(tmp_path):
    run = traced_run(tmp_path / '<script>pwned=1</script>"&', 2, host=EVIL.replace("{", ""), config={EVIL: EVIL})
    write_json(RunDir(run).profile / "host.json", {"torch": 1.0, EVIL: 1.0})
    page = tmp_path / "page.html"
    assert main([str(run), "--html", str(page)]) == 0
    text = page.read_text()
    assert len(check_page(text)) == 4, "only the page's own images"
    assert "<script" not in text
    assert not {"\u202e", "\x1b", "\r"} & set(text)


@pytest.mark.parametrize(("ranks", "inches"), [(2, 3.35), pytest.param(12, 6.9, marks=pytest.mark.full)])
def test_figures_for_a_paper(tmp_path, capsys, ranks, inches):
    run = traced_run(tmp_path / "run", ranks)
    assert main([str(run), "--figures", str(tmp_path / "figures")]) == 0
    paths = [tmp_path / "figures" / f"{name}.{form}" for name in ("step", "collectives", "memory", "wall")
             for form in ("pdf", "svg", "png")]
    assert "figures: " + ", ".join(map(str, paths)) in capsys.readouterr().out
    assert paths[0].read_bytes().startswith(b"%PDF")
    assert b"/Type3" not in paths[0].read_bytes()
    assert paths[2].read_bytes()[16:20] == int(inches * 300).to_bytes(4, "big")  # width in a PNG's header


def test_standard_output_has_only_json(run, tmp_path):
    process = subprocess.run([sys.executable, "-m", "ezpz_llm.explain", str(run), "--json", "--html", "page.html"],
                             cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60), check=True)
    assert json.loads(process.stdout)["ranks"] == 4
    assert process.stderr == "\npage: page.html\n"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
