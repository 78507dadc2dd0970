"""Measure time and memory of `report` and `explain` on large files: many steps, and traces of a gigabyte.

    python3 benchmarks/million_steps.py [--steps 1000000] [--trace-mb 1000]
        [--out benchmarks/results/million_steps.json]

Each command runs separately on a synthetic run directory in a temporary folder (500 MB per million steps). Rank 0
has a trace of that uncompressed size, with the fields and events that torch.profiler writes for a small GPT on a
CPU. Traces of several ranks are read sequentially.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PHASES = {"data_s": 0.01, "forward_s": 0.03, "backward_s": 0.05, "optimizer_s": 0.009, "other_s": 0.001}


def make_run(folder: Path, steps: int) -> Path:
    """Write the run directory of a training run with `steps` lines."""
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


OPERATORS = 40
"""Layers of a step, whose forward pass runs on the main thread and whose backward pass on autograd's."""


def make_trace(run: Path, megabytes: int) -> int:
    """Write rank 0's trace of at least `megabytes` uncompressed, and return its number of events."""
    (run / "profile").mkdir()
    collectives = [{"kind": "all_reduce", "axes": "dp", "ranks": [0, 1], "bytes": 3468288}]
    notes = {"rank": 0, "device": "cpu", "layout": "ddp", "collectives": collectives}
    written, events, step = 0, 0, 0
    with gzip.open(run / "profile" / "trace-rank0000.json.gz", "wb", compresslevel=1) as file:
        file.write(b'{"schemaVersion": 1, "deviceProperties": [], "host_name": "made-up", "traceEvents": [')
        while written < megabytes * 1e6:
            lines = [json.dumps(event) for event in traced_step(step)]
            part = ",\n".join(lines).encode()
            file.write((b",\n" if step else b"") + part)
            written, events, step = written + len(part), events + len(lines), step + 1
        file.write(b'], "ezpz_llm": ' + json.dumps(notes).encode() + b"}")
    return events


def traced_step(step: int) -> Iterator[dict[str, Any]]:
    """Return the events of a step of 20 ms."""
    start, main, autograd, gloo = 4.4e12 + step * 20_000, 17835, 18065, 18047

    def event(category: str, name: str, at: float, us: float, thread: int = main) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "pid": main, "tid": thread, "ts": round(start + at, 3),
                "dur": us, "args": {"External id": step, "Record function id": 0, "Sequence number": step,
                                    "Fwd thread id": 0, "Ev Idx": step}}

    yield event("user_annotation", f"step {step + 1}", 0, 19_990)
    for name, at, us in (("data", 10, 300), ("forward", 400, 6_000), ("backward", 6_500, 9_000),
                         ("optimizer", 16_000, 3_000)):
        yield event("user_annotation", name, at, us)
    for place in range(OPERATORS):
        at = 400 + 140 * place
        yield event("cpu_op", "aten::linear", at, 90.125)
        yield event("cpu_op", "aten::addmm", at + 5.5, 80.25)
        yield event("cpu_op", "aten::view", at + 110.75, 1.5)
        yield {"ph": "s", "id": step, "pid": main, "tid": main, "ts": start + at, "cat": "fwdbwd", "name": "fwdbwd"}
        at = 6_500 + 160 * place
        yield event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", at, 150.125, autograd)
        yield event("cpu_op", "AddmmBackward0", at + 2.5, 140.5, autograd)
        yield event("cpu_op", "aten::mm", at + 5.25, 130.75, autograd)
        yield event("cpu_op", "aten::resolve_conj", at + 7.125, 3.25, autograd)
        yield {"ph": "f", "id": step, "pid": main, "tid": autograd, "ts": start + at, "cat": "fwdbwd",
               "name": "fwdbwd", "bp": "e"}
    yield event("cpu_op", "c10d::allreduce_", 13_000, 50.75)
    yield event("user_annotation", "gloo:all_reduce", 13_020, 1_900.5, gloo)


def measure(*words: str) -> dict[str, float]:
    """Return a command's CPU seconds and peak memory in MB.

    Raises:
        RuntimeError: the command failed.
    """
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)}: {errors.decode()}")
    return {"processor_s": round(used.ru_utime + used.ru_stime, 2), "most_mb": round(used.ru_maxrss / 1024)}


def main() -> int:
    """Measure, print the results, and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace-mb", type=int, default=1000)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), options.steps)
        found = {"date": time.strftime("%Y-%m-%d"), "steps": options.steps,
                 "metrics_mb": round((run / "metrics.jsonl").stat().st_size / 1e6),
                 "report": measure("ezpz_llm.report", str(run)),
                 "report --html": measure("ezpz_llm.report", str(run), "--html", f"{folder}/page.html"),
                 "explain": measure("ezpz_llm.explain", str(run))}
        found |= {"trace_mb": options.trace_mb, "trace_events": make_trace(run, options.trace_mb),
                  "explain with the trace": measure("ezpz_llm.explain", str(run))}
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
