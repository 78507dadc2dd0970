"""metrics.jsonl: fields, synchronizations of the device, and resumed runs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, SideFiles, read_lines
from ezpz_llm.training.observe import MetricsLog, Peak, StepTimeline, StepWork

WORK = StepWork(micro_batch=2, accumulation=3, dp_size=1, world_size=1, block_size=8)
FIELDS = {"step", "loss", "lr", "grad_norm", "step_time_s", "tokens_per_second", "tokens_per_second_per_device",
           "data_s", "forward_s", "backward_s", "optimizer_s", "other_s"}
ALONE = SimpleNamespace(rank=0, world_size=1, is_main=True, device=torch.device("cpu"), backend=None,
                        side=SideFiles())


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "run").create()


def make_log(run_dir, work=WORK, **options):
    options = {"total_steps": 100, "console": False, **options}
    return MetricsLog(run_dir, ALONE, work, **options), StepTimeline(torch.device("cpu"))


def take_step(log, timeline, step, loss=2.0):
    timeline.begin_step()
    for phase in ("data", "forward", "backward", "optimizer"):
        with timeline.span(phase):
            torch.randn(64, 64) @ torch.randn(64, 64)
    timeline.end_step()
    log.record(step, torch.tensor(loss), torch.tensor(0.5), 1e-3)


def test_lines_have_exactly_the_documented_fields(run_dir):
    log, timeline = make_log(run_dir)
    for step in range(1, 6):
        take_step(log, timeline, step, loss=3.0 / step)
        if step == 3:
            log.record_validation(step, 2.25, 640)
    log.flush(timeline)
    log.flush(timeline)

    lines = list(read_lines(run_dir.metrics))

    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert set(line) == FIELDS | ({"val_loss", "val_tokens"} if line["step"] == 3 else set())
        assert line["loss"] == pytest.approx(3.0 / line["step"], rel=1e-7)
        assert line["tokens_per_second"] == pytest.approx(2 * 3 * 8 / line["step_time_s"])
        phases = [line[f"{name}_s"] for name in ("data", "forward", "backward", "optimizer", "other")]
        assert abs(sum(phases) - line["step_time_s"]) < 1e-9
    assert (lines[2]["val_loss"], lines[2]["val_tokens"]) == (2.25, 640)
    with pytest.raises(ValueError, match="step 5 has no line"):
        log.record_validation(5, 2.0, 640)


def test_no_tensor_is_read_between_flushes(run_dir, monkeypatch):
    log, timeline = make_log(run_dir)
    reads = []

    def counting(name, original):
        def counted(self, *args, **kwargs):
            reads.append(name)
            return original(self, *args, **kwargs)
        return counted

    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__format__", "__repr__"):
        monkeypatch.setattr(torch.Tensor, name, counting(name, getattr(torch.Tensor, name)))
    for step in range(1, 41):
        take_step(log, timeline, step)
    assert reads == []
    log.flush(timeline)
    assert reads == ["tolist"], "one read per flush"


def test_recorded_values_do_not_change_if_the_engine_reuses_its_tensors(run_dir):
    log, timeline = make_log(run_dir)
    loss, norm = torch.tensor(1.0), torch.tensor(2.0)
    for step in (1, 2):
        timeline.begin_step()
        timeline.end_step()
        log.record(step, loss, norm, 1e-3)
        loss += 1
        norm += 1
    log.flush(timeline)
    assert [(line["loss"], line["grad_norm"]) for line in read_lines(run_dir.metrics)] == [(1, 2), (2, 3)]


def test_resumed_run_drops_lines_after_its_checkpoint_and_appends(run_dir):
    log, timeline = make_log(run_dir)
    for step in range(1, 9):
        take_step(log, timeline, step)
    log.flush(timeline)
    before = run_dir.metrics.read_bytes().splitlines(keepends=True)
    with run_dir.metrics.open("ab") as file:
        file.write(b'{"step": 9, "lo')  # the line that a crash has truncated

    log, timeline = make_log(run_dir, first_step=5)
    assert run_dir.metrics.read_bytes() == b"".join(before[:5])
    for step in (6, 7):
        take_step(log, timeline, step, loss=9.0)
    log.flush(timeline)

    assert run_dir.metrics.read_bytes().startswith(b"".join(before[:5]))
    lines = list(read_lines(run_dir.metrics))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["loss"] for line in lines[5:]] == [9.0, 9.0]


def test_new_run_does_not_overwrite_metrics_of_another_run(run_dir):
    log, timeline = make_log(run_dir)
    take_step(log, timeline, 1)
    log.flush(timeline)
    before = run_dir.metrics.read_bytes()
    with pytest.raises(UserError, match="already holds 1 steps") as error:
        make_log(run_dir)
    assert "--resume" in str(error.value)
    assert run_dir.metrics.read_bytes() == before


def test_non_finite_loss_is_null_and_reported(run_dir, capsys):
    log, timeline = make_log(run_dir)
    for step, loss in enumerate((2.0, float("nan"), float("inf")), start=1):
        take_step(log, timeline, step, loss)
    log.flush(timeline)

    def reject(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=reject) for line in run_dir.metrics.read_text().splitlines()]
    assert [line["loss"] for line in lines] == [2.0, None, None]
    assert "the loss is not finite from step 2 on" in capsys.readouterr().out


def test_mfu_above_one_is_omitted_and_reported(run_dir, capsys):
    peak = Peak("a device with a wrong peak", "bf16", 1.0, "nowhere")
    log, timeline = make_log(run_dir, StepWork(2, 3, 1, 1, 8, flops_per_token=1e6, peak=peak))
    for step in (1, 2):
        take_step(log, timeline, step)
    log.flush(timeline)
    assert all("mfu" not in line for line in read_lines(run_dir.metrics))
    printed = capsys.readouterr().out
    assert printed.count("error: step 1 has an MFU of") == 1
    assert "a device with a wrong peak" in printed


def test_mfu_is_a_fraction_of_the_stated_peak(run_dir):
    # 50,000 tokens/s on each of 8 H100, 1.24B parameters at 6N + 12LCT: 41.7 % (dense peak, not the sparse one).
    work = StepWork(64, 1, 8, 8, 2048, flops_per_token=8.2548e9, peak=Peak("H100", "bf16", 989e12, "vendor"))
    assert work.tokens == 2**20
    assert work.rates(2**20 / 400_000).mfu == pytest.approx(0.417, abs=5e-4)


def test_rates_include_accumulation_and_all_ranks():
    # 64 sequences of 1024 tokens on each of 4 ranks in 0.283 s: 905 sequences/s; 64 / 4.5 would be 14.1.
    rates = StepWork(16, 4, 4, 4, 1024).rates(0.2829)
    assert rates.tokens_per_second / 1024 == pytest.approx(905, rel=1e-3)
    assert rates.tokens_per_second == pytest.approx(926e3, rel=1e-3)
    assert rates.tokens_per_second_per_device == pytest.approx(231.7e3, rel=1e-3)
    assert rates.mfu is None
    # Two tensor-parallel peers share the work of a data-parallel rank.
    assert StepWork(16, 4, 2, 4, 1024).rates(1.0).tokens_per_second_per_device == 16 * 4 * 2 * 1024 / 4


def test_progress_lines_are_aligned_with_the_legend(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    peak = Peak("a device", "fp32", 1e15, "vendor")
    log, timeline = make_log(run_dir, StepWork(2, 3, 1, 1, 8, flops_per_token=1e6, peak=peak), console=True,
                             total_steps=1500, flush_every=4)
    flushed = []
    for step in range(1, 9):
        take_step(log, timeline, step, loss={4: float("nan")}.get(step, 11.0 if step < 6 else 1.2345))
        if step == 6:
            log.record_validation(step, 1.9876, 640)
        if log.due:
            log.flush(timeline)
            flushed.append(step)
    assert flushed == [1, 4, 8]
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("warning")]
    assert lines[0].split() == ["step", "done", "loss", "lr", "grad", "norm", "ms/step", "tok/s", "tok/s/dev",
                                "MFU", "elapsed", "left", "val", "loss"]
    assert [line.split()[0] for line in lines[1:]] == ["1/1500", "4/1500", "6/1500", "8/1500"]
    ends = [index for index, _ in enumerate(lines[0], start=1) if index == len(lines[0]) or
            (lines[0][index - 1] != " " and lines[0][index : index + 2] == "  ")]
    for line in lines[1:]:
        assert len(line) <= len(lines[0]) <= 120
        assert all(line[end - 1] != " " for end in ends if end <= len(line)), "a cell is not aligned"
    assert "inf/nan" in lines[2]
    assert lines[3].endswith("1.9876")
    assert "1.2345" in lines[4]


def test_step_without_times_is_an_error(run_dir):
    log, timeline = make_log(run_dir)
    log.record(1, torch.tensor(1.0), torch.tensor(1.0), 1e-3)
    with pytest.raises(ValueError, match="1 steps were recorded, 0 were timed"):
        log.flush(timeline)
