"""What `report` and `explain` take of a run of many steps: processor time and memory.

    python3 benchmarks/million_steps.py [--steps 1000000] [--out benchmarks/results/million_steps.json]

Each command runs by itself on a run directory that is made up, in a temporary folder (500 MB a million steps).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PHASES = {"data_s": 0.01, "forward_s": 0.03, "backward_s": 0.05, "optimizer_s": 0.009, "other_s": 0.001}


def make_run(folder: Path, steps: int) -> Path:
    """A run directory as the trainer leaves it, with so many lines."""
    (folder / "run").mkdir()
    with (folder / "run" / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "loss": 2 + 3 / (1 + step / 1000), "lr": 3e-4 * (1 - step / steps),
                    "grad_norm": 1 + 1 / step, "step_time_s": 0.1 + 1e-3 * (step % 17),
                    "tokens_per_second": 20480.123456789, "tokens_per_second_per_device": 10240.0617283945,
                    **PHASES, "mfu": 0.412345678901234}
            if step % 1000 == 0:
                line |= {"val_loss": 2.1, "val_tokens": 65536}
            file.write(json.dumps(line) + "\n")
    model = {"block_size": 64, "vocab_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 64}
    device = {"type": "cpu"}
    record = {"config": {"model": "tiny-gpt2", "steps": steps, "log_every": 50}, "model": model,
              "precision": "fp32", "environment": {"world_size": 2, "device": device},
              "launch": {"started": time.time()}}
    (folder / "run" / "run.json").write_text(json.dumps(record))
    batch = {"global_batch": 8, "micro_batch": 2, "accumulation": 2, "dp_size": 2}
    (folder / "run" / "layout.json").write_text(json.dumps({
        "layout": {"name": "ddp", "engine": "ddp"}, "batch": batch, "precision": "fp32"}))
    return folder / "run"


def measure(*words: str) -> dict[str, float]:
    """A command's processor seconds and its largest memory in MB.

    Raises:
        RuntimeError: it failed.
    """
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    complaint = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: {complaint.decode()}")
    return {"processor_s": round(used.ru_utime + used.ru_stime, 2), "most_mb": round(used.ru_maxrss / 1024)}


def main() -> int:
    """Measure and print, and write to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), options.steps)
        found = {"date": time.strftime("%Y-%m-%d"), "steps": options.steps,
                 "metrics_mb": round((run / "metrics.jsonl").stat().st_size / 1e6),
                 "report": measure("ezpz_llm.report", str(run)),
                 "report --html": measure("ezpz_llm.report", str(run), "--html", f"{folder}/page.html"),
                 "explain": measure("ezpz_llm.explain", str(run))}
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
