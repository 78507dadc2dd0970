"""Run directories with the files that the trainer writes, without a run."""

from __future__ import annotations

from pathlib import Path

from ezpz_llm.core.rundir import RunDir, append_line, write_json

PHASES = {"data_s": 0.01, "forward_s": 0.03, "backward_s": 0.05, "optimizer_s": 0.009, "other_s": 0.001}


def make_run(folder: Path, lines=range(1, 101), tokens=2048, *, planned=100, lr=0.004, **record) -> Path:
    """Create a run directory with the files that the trainer writes."""
    run_dir = RunDir(folder).create()
    for step in lines:
        append_line(run_dir.metrics, {
            "step": step, "loss": 5 - 0.02 * step + lr, "lr": lr, "grad_norm": 1 + 1 / step, "step_time_s": 0.1,
            "tokens_per_second": tokens / 0.1, "tokens_per_second_per_device": tokens / 0.2, **PHASES,
            **({"val_loss": 5.1 - 0.02 * step, "val_tokens": 64} if step % 50 == 0 else {})})
    write_json(run_dir.record, {
        "config": {"model": "tiny-gpt2", "steps": planned, "lr": lr, "min_lr": lr / 10, "log_every": 10},
        "sources": {"model": {"origin": "default"}, "steps": {"origin": "default"},
                    "lr": {"origin": "command_line"}, "min_lr": {"origin": "tenth", "detail": "lr"}},
        "environment": {"world_size": 2, "versions": {"torch": "2.13.0"}, "device": {"type": "cpu"}},
        "precision": "fp32", "launch": {"typed": ["launch", "-n", "2"], "started": 1000.0}, **record})
    return folder
