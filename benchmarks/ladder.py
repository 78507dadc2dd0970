"""Measure the speedup by each optimization: python3 benchmarks/ladder.py [--work NAME] [--out FILE.json]

Each rung adds one option of `ezpz_llm.train` to the previous rungs; the last rungs are each tried separately on
top of the ladder. Each rung runs in its own process, with the same steps on the same samples, and is timed with a
device synchronization after each step, without the first steps (compilation, allocation of moments). Rounds
alternate between all rungs, so that other load on the machine affects all rungs equally. Prints medians over all
rounds: step time, tokens/s, tokens per CPU second, MFU if the peak of the device is known, peak memory, and the
final loss. The benchmark fails if the loss of a rung does not decrease. For a rung that cannot run, it prints the
reason.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.layout.precision_recipes import RECIPES


@dataclass(frozen=True)
class Rung:
    """Rung of the ladder and the options that it adds; with `alone`, later rungs do not include them."""

    name: str
    options: tuple[str, ...]
    alone: bool = False


GROUND = ("--ds-config", "ddp", "--corpus", "stdlib", "--tokenizer", "bytes", "--precision", "fp32", "--attention",
          "explicit", "--optimizer", "adamw_unfused", "--loss-chunk", "0", "--grad-clip", "0", "--vocab-multiple",
          "1", "--lr", "6e-4", "--gradient-accumulation-steps", "1")
RUNGS = (
    Rung("fp32", ()),
    Rung("tf32", ("--precision", "tf32")),
    Rung("bf16 autocast", ("--precision", "bf16_autocast")),
    Rung("compiled blocks", ("--compile", "true")),
    Rung("fused attention", ("--attention", "auto")),
    Rung("rows to a multiple of 128", ("--vocab-multiple", "128")),
    Rung("fused AdamW, clipping", ("--optimizer", "adamw", "--grad-clip", "1")),
    Rung("chunked loss", ("--loss-chunk", "null")),
    Rung("bf16 parameters", ("--precision", "bf16"), alone=True),
    Rung("fp32 on top", ("--precision", "fp32"), alone=True),
    Rung("without compilation", ("--compile", "false"), alone=True),
    Rung("FlashAttention-3", ("--attention", "flash3"), alone=True),
    Rung("z-loss", ("--z-loss", "1e-4"), alone=True),
    Rung("8-bit AdamW", ("--optimizer", "adamw_8bit"), alone=True),
    Rung("recompute every 2nd block", ("--recompute", "2"), alone=True),
    Rung("recompute selectively", ("--recompute", "selective"), alone=True),
    Rung("recompute every block", ("--recompute", "1"), alone=True),
)
WORKS = {
    "tiny": ("--model", "tiny-gpt2", "--n-layer", "2", "--block-size", "64", "--global-batch-size", "4"),
    "small": ("--model", "gpt2-124m", "--n-layer", "6", "--n-head", "6", "--n-embd", "384", "--block-size", "256",
              "--global-batch-size", "8"),
    "gpt2-124m": ("--model", "gpt2-124m", "--global-batch-size", "16"),
    "llama3-1b": ("--model", "llama3-1b", "--global-batch-size", "8"),
}
"""Shapes and batches: to try the benchmark; for a CPU (six layers of 384); and those of published tables."""
SKIP = 3
TIMEOUT_S = 1800


def arguments(work: str, rung: Rung, steps: int) -> list[str]:
    """Return the rung's options for `ezpz_llm.train`; later options override earlier ones.

    A rung that is not in `RUNGS` is added to the whole ladder.
    """
    end = RUNGS.index(rung) if rung in RUNGS else len(RUNGS)
    before = [one for one in RUNGS[:end] if not one.alone]
    words = [*GROUND, *WORKS[work], "--steps", str(steps), "--warmup-steps", "2"]
    for one in (*before, rung):
        words += one.options
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    return [word for pair in pairs.items() for word in pair]


def measure(words: list[str], folder: Path) -> dict[str, Any]:
    """Run and time the steps in this process."""
    import resource
    import time

    import torch

    from ezpz_llm.core.base.records import as_plain
    from ezpz_llm.training.data.samples import Batches
    from ezpz_llm.training.dist.setup import setup
    from ezpz_llm.training.evaluate.validation import open_corpus
    from ezpz_llm.training.model.parameters import flops_per_token
    from ezpz_llm.training.observe import peak_flops, run_environment
    from ezpz_llm.training.trainer.options import parse
    from ezpz_llm.training.trainer.plan import plan_run
    from ezpz_llm.training.trainer.run import make_engine
    from ezpz_llm.training.trainer.schedule import learning_rate

    options = parse(words)
    with setup(run_dir=folder) as dist:
        data = open_corpus(options.config.corpus, options.config.tokenizer, dist)
        plan = plan_run(options, 1, vocab_size=data.vocab_size, device=dist.device.type)
        config, batch = plan.config, plan.resolved.batch
        dist.arrange()
        device, on_host = dist.device, dist.device.type == "cpu"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        engine = make_engine(plan, dist)
        batches = Batches(data.split("train"), block_size=plan.model.block_size, seed=config.seed,
                          global_batch=batch.global_batch, micro_batch=batch.micro_batch, dp_rank=0, dp_size=1)
        losses, walls, processors = [], [], []
        for step in range(config.steps):
            if step == SKIP and not on_host:
                torch.get_device_module(device).reset_peak_memory_stats()
            arrays = batches.micro_batches(step * batch.global_batch)
            micro = [tuple(torch.from_numpy(array).to(device) for array in pair) for pair in arrays]
            rate = learning_rate(step, config)
            wall, processor = time.perf_counter(), time.process_time()
            loss, _ = engine.train_step(micro, rate, lambda phase: nullcontext())
            if not on_host:
                torch.get_device_module(device).synchronize()
            walls.append(time.perf_counter() - wall)
            processors.append(time.process_time() - processor)
            losses.append(loss.item())
        tokens = plan.tokens_per_step
        peak = peak_flops(device, RECIPES[plan.resolved.precision].products)
        result = {"tokens": tokens, "wall_s": walls[SKIP:], "cpu_s": processors[SKIP:],
                  "first_steps_s": walls[:SKIP], "losses": losses, "flops": flops_per_token(plan.model) * tokens,
                  "peak_flops": peak.flops if peak else None, "environment": as_plain(run_environment(dist))}
        if on_host:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return {**result, "memory_bytes": most - before, "memory_at_start_bytes": before}
        module = torch.get_device_module(device)
        return {**result, "memory_bytes": module.max_memory_allocated(),
                "reserved_bytes": module.max_memory_reserved()}


def in_a_process(words: list[str], program: Path = Path(__file__)) -> dict[str, Any]:
    """Measure in a separate process; return {"refused": reason} if the options cannot run here.

    Args:
        program: this file, or that of another checkout, which then runs its own package.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        paths = [str(program.resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run([sys.executable, program, "--measure", str(out), "--", *words], capture_output=True,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, text=True,
                              timeout=TIMEOUT_S, check=False)
        if not out.exists():
            raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return json.loads(out.read_text())


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over all steps of all rounds, and the quartiles of the step time."""
    walls = sorted(wall for one in rounds for wall in one["wall_s"])
    step, processor = statistics.median(walls), statistics.median(t for one in rounds for t in one["cpu_s"])
    one = rounds[0]
    tokens, losses = one["tokens"], one["losses"]
    reached = statistics.mean(losses[-3:])
    quarter = len(walls) // 4
    return {"step_ms": step * 1e3, "quartiles_ms": [walls[quarter] * 1e3, walls[-1 - quarter] * 1e3],
            "tokens_per_second": tokens / step, "tokens_per_cpu_second": tokens / processor,
            "mfu": one["flops"] / step / one["peak_flops"] if one["peak_flops"] else None,
            "memory_bytes": max(one["memory_bytes"] for one in rounds),
            **({"reserved_bytes": max(one["reserved_bytes"] for one in rounds)} if "reserved_bytes" in one else {}),
            "first_step_s": max(one["first_steps_s"][0] for one in rounds), "steps": len(walls),
            "loss_first": losses[0], "loss_reached": reached, "learns": reached < losses[0] - 0.5}


def line(name: str, found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"{name:<28}not here: {found['refused']}"
    mfu = f"{found['mfu']:6.1%}" if found["mfu"] else "     -"
    return (f"{name:<28}{found['step_ms']:9.1f}{found['tokens_per_second']:11,.0f}"
            f"{found['tokens_per_cpu_second']:11,.0f}{mfu:>8}{found['memory_bytes'] / 1e9:9.2f}"
            f"{found['first_step_s']:9.1f}{found['loss_reached']:9.4f}"
            f"{'' if found['learns'] else '  DOES NOT LEARN'}")


def measured_child(out: Path, words: list[str]) -> int:
    from ezpz_llm.core.base.errors import UserError

    with tempfile.TemporaryDirectory() as folder:
        try:
            result = measure(words, Path(folder) / "run")
        except UserError as error:
            result = {"refused": error.found}
    out.write_text(json.dumps(result))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", choices=sorted(WORKS), help="model and batch (small on CPU, else gpt2-124m)")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rungs", help="comma-separated names (all)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        return measured_child(given.measure, given.words)
    if given.steps < SKIP + 3:
        parser.error(f"--steps {given.steps}: must be at least {SKIP + 3}, since the first {SKIP} are not measured")
    import torch

    work = given.work or ("gpt2-124m" if torch.cuda.is_available() else "small")
    rungs = [rung for rung in RUNGS if given.rungs is None or rung.name in given.rungs.split(",")]
    load = os.getloadavg()
    rounds: dict[str, list[dict[str, Any]]] = {rung.name: [] for rung in rungs}
    refused: dict[str, str] = {}
    for number in range(given.rounds):
        for rung in rungs:
            if rung.name in refused:
                continue
            found = in_a_process(arguments(work, rung, given.steps))
            if "refused" in found:
                refused[rung.name] = found["refused"]
                continue
            rounds[rung.name].append(found)
            print(f"round {number + 1}, {rung.name}: {statistics.median(found['wall_s']) * 1e3:.0f} ms", flush=True)
    table = {rung.name: {"refused": refused[rung.name]} if rung.name in refused else summary(rounds[rung.name])
             for rung in rungs}
    print(f"\n{work}\n{'rung':<28}{'ms/step':>9}{'tok/s':>11}{'tok/CPU-s':>11}{'MFU':>8}{'GB':>9}{'first s':>9}"
          f"{'loss':>9}")
    for name, found in table.items():
        print(line(name, found))
    learns = all(found.get("learns", True) for found in table.values())
    if given.out:
        environment = next(one[0]["environment"] for one in rounds.values() if one)
        write_json(given.out, {
            "command": " ".join(["python3", "benchmarks/ladder.py", *sys.argv[1:]]), "work": work,
            "options": {rung.name: " ".join(arguments(work, rung, given.steps)) for rung in rungs},
            "date": datetime.date.today().isoformat(), "rounds": given.rounds, "load_before": load,
            "load_after": os.getloadavg(), "device": environment["device"], "threads": environment["threads"],
            "versions": environment["versions"], "learns": learns, "rungs": table})
    return 0 if learns else 1


if __name__ == "__main__":
    sys.exit(main())
