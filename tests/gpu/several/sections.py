"""Sections of the suite for several ranks. Each returns what it found wrong, and its numbers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

_HERE = Path(__file__).resolve().parent
_SMALL = ("--n-layer", "4", "--n-embd", "64", "--n-head", "4", "--block-size", "64", "--eval-every", "0",
          "--sample-tokens", "0", "--profile", "false", "--log-every", "1", "--precision", "fp32")
_LAYOUTS = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2", "tp2", "tp2_zero1", "tp2_zero3", "sp2", "pp2",
            "tiled")
_PAIRS = ("tp2", "tp2_zero1", "tp2_zero3", "sp2", "pp2")
_LOSS_TOLERANCE = 1e-4
"""Relative difference between runs whose sums have another order, over a hundred steps in fp32."""


@dataclass(frozen=True)
class Setting:
    """Ranks, device, and folder of the sections.

    Attributes:
        folder: folder for run directories, removed at the end.
        shares_device: True if there are fewer devices than ranks.
        uses_gloo: True if ranks use gloo for device tensors, because NCCL refuses ranks that share a GPU.
        plant: name of a fault that the ranks plant (faulty_rank.py), or None.
        deadline: end of the time, on the monotonic clock.
        device_gb: memory of a device in GB.
    """

    ranks: int
    device: str
    folder: Path
    shares_device: bool = False
    uses_gloo: bool = False
    plant: str | None = None
    deadline: float = float("inf")
    device_gb: float = 0.0

    @property
    def is_cpu(self) -> bool:
        """True if the suite tests itself: models are tiny, and nothing is compiled."""
        return self.device == "cpu"

    @property
    def idle_s(self) -> int:
        """Seconds without a sign of life after which launch ends a hang."""
        return 20 if self.is_cpu else 90

    def fits(self, layout: str) -> bool:
        """Return True if the ranks can be divided into the groups of the layout."""
        return self.ranks % 2 == 0 or layout not in _PAIRS

    def until(self, deadline: float) -> Setting:
        """Return the same setting with another end of the time."""
        return replace(self, deadline=deadline)

    def command(self, name: str, program: Sequence[str], *options: str) -> list[str]:
        """Return the command that starts a program on the ranks, with the run directory `name`."""
        wrap = ["--wrap", f"{sys.executable} {_HERE / 'sharing_rank.py'}"] if self.shares_device else []
        if self.plant is not None:
            program = [str(_HERE / "faulty_rank.py"), self.plant, *program]
        if self.uses_gloo:
            program = [str(_HERE / "gloo_rank.py"), *program]
        return [sys.executable, "-m", "ezpz_llm.launch", "-n", str(self.ranks), "--run-dir",
                str(self.folder / name), *wrap, *options, sys.executable, *program]

    def run(self, name: str, program: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
        """Run a program on the ranks, until it ends or the time is up."""
        command = self.command(name, program, "--idle-timeout", str(self.idle_s), *options)
        return subprocess.run(command, capture_output=True, text=True, check=False, env=_environment(),
                              timeout=max(1.0, self.deadline - time.monotonic()))

    def train(self, name: str, *options: str) -> list[str]:
        """Train on the ranks; return what is wrong."""
        return _problems(self.run(name, ("-m", "ezpz_llm.train", "--device", self.device, *options)), name)

    def record(self, name: str) -> dict[str, Any]:
        """Return run.json of a run."""
        return json.loads((self.folder / name / "run.json").read_text())

    def losses(self, name: str) -> dict[int, float]:
        """Return the loss of each step of a run; of a repeated step, the last one."""
        lines = map(json.loads, (self.folder / name / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines}


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}


def _problems(done: subprocess.CompletedProcess[str], what: str) -> list[str]:
    """Return the first lines of the post-mortem, or the error, of a command that failed."""
    if done.returncode == 0:
        return []
    lines = done.stderr.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(("launch: ", "error: "))]
    text = " ".join(line.strip() for line in lines[starts[-1]:][:2]) if starts else done.stderr[-300:]
    return [f"{what}: exit code {done.returncode}: {text}"]


def sharing_works(setting: Setting) -> bool:
    """Return True if the ranks can sum a tensor on the device that they share."""
    return setting.run("sharing", (str(_HERE / "summing_rank.py"), setting.device)).returncode == 0


def collectives(setting: Setting) -> dict[str, Any]:
    """Check the values of every kind of collective, and measure links."""
    done = setting.run("collectives", ("-m", "ezpz_llm.test_dist", "--device", setting.device))
    found = _problems(done, "test_dist")
    with contextlib.suppress(OSError, KeyError):
        outcome = setting.record("collectives")["test_dist"]
        found += [finding["found"] for finding in outcome["findings"] if finding["level"] == "bad"]
        return {"found": found, "reductions": outcome["reductions"],
                "environment": setting.record("collectives").get("environment")}
    return {"found": found}


def certify(setting: Setting) -> dict[str, Any]:
    """Certify every layout that fits the number of ranks, in fp32 and bf16."""
    path = setting.folder / "certify.json"
    done = setting.run("certify", ("-m", "ezpz_llm.certify", "--device", setting.device, "--model", "tiny-llama",
                                   "--dtype", "fp32,bf16", "--steps", "3", "--json", str(path)))
    if not path.is_file():
        return {"found": _problems(done, "certify")}
    results = json.loads(path.read_text())["results"]
    found = [f"{result['layout']} {result['dtype']}: {result['failures'][0]}"
             for result in results if not result["passed"]]
    return {"found": found or _problems(done, "certify"), "cases": len(results),
            "passed_cases": sum(result["passed"] for result in results)}


def checkpoint(setting: Setting) -> dict[str, Any]:
    """Kill a rank after the second background checkpoint, resume under another layout, and compare the losses."""
    options = (*_SMALL, "--steps", "100", "--compile", "false", "--save-async", "true")
    found = setting.train("whole", *options, "--ds-config", "zero2", "--save-every", "0")
    killed = ("-m", "ezpz_llm.train", "--device", setting.device, *options, "--ds-config", "zero2",
              "--save-every", "20")
    command = setting.command("killed", killed, "--idle-timeout", str(setting.idle_s))
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    latest = setting.folder / "killed" / "checkpoints" / "step-00000040"
    try:
        while not latest.exists() and process.poll() is None and time.monotonic() < setting.deadline:
            time.sleep(0.05)
        for rank in _ranks_of(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGKILL)
                break
        if process.wait(timeout=max(1.0, setting.deadline - time.monotonic())) == 0:
            found.append("the run ended before it could be killed")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    layout = "fsdp2"
    found += setting.train("killed", "--resume", str(setting.folder / "killed"), "--ds-config", layout)
    if found:
        return {"found": found}
    whole, resumed = setting.losses("whole"), setting.losses("killed")
    apart = {step: abs(loss - resumed.get(step, float("inf"))) / loss for step, loss in whole.items()}
    worst = max(apart, key=apart.__getitem__)
    if not apart[worst] <= _LOSS_TOLERANCE:
        found.append(f"after a resume under {layout}, the loss of step {worst} differs by {apart[worst]:.2g} "
                     "(relative) from that of a run that was not killed")
    return {"found": found, "largest_difference": apart[worst]}


def _ranks_of(pid: int) -> Iterator[psutil.Process]:
    """Yield the processes of ranks that launch started, the last rank first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [process for process in psutil.Process(pid).children(recursive=True)
                     if "ezpz_llm.train" in " ".join(process.cmdline())]
        yield from sorted(processes, key=lambda process: process.pid, reverse=True)


def pipelines(setting: Setting) -> dict[str, Any]:
    """Compare a compiled pipeline with an eager one."""
    if not setting.fits("pp2"):
        return {"found": [], "skipped": f"{setting.ranks} ranks cannot be divided into pairs of stages"}
    options = (*_SMALL, "--steps", "6", "--ds-config", "pp2", "--save-every", "-1")
    found = [*setting.train("eager", *options, "--compile", "false"),
             *setting.train("compiled", *options, "--compile", "true")]
    if found:
        return {"found": found}
    eager, compiled = setting.losses("eager"), setting.losses("compiled")
    worst = max(abs(loss - compiled[step]) / loss for step, loss in eager.items())
    return {"found": [] if worst <= _LOSS_TOLERANCE else [f"a compiled pipeline's loss differs by {worst:.2g}"],
            "largest_difference": worst}


def hang(setting: Setting) -> dict[str, Any]:
    """Check that a rank that skips a collective is named."""
    done = setting.run("hang", (str(_HERE / "skipping_rank.py"), setting.device))
    why = subprocess.run([sys.executable, "-m", "ezpz_llm.why", str(setting.folder / "hang"), "--json"],
                         capture_output=True, text=True, check=False, timeout=120)
    named = json.loads(why.stdout).get("collectives") if why.returncode == 0 else why.stderr
    last = setting.ranks - 1
    is_named = bool(named) and named.startswith(f"rank {last} did not call collective")
    found = [] if done.returncode == 124 else [f"launch did not end the hang: exit code {done.returncode}"]
    return {"found": found if is_named else [*found, f"the hang is explained by: {named}"], "named": named}


_MODELS = {
    "gpt2-124m": ("--micro-batch-size", "16", "--vocab-multiple", "50304", "--ds-config", "ddp"),
    "llama3-1b": ("--micro-batch-size", "8", "--vocab-multiple", "128256", "--ds-config", "fsdp2"),
    "llama3-8b": ("--micro-batch-size", "1", "--block-size", "2048", "--vocab-multiple", "128256", "--ds-config",
                  "fsdp2", "--recompute", "1"),
}
"""Models whose speed is measured. Ranks that share a device run only the first one."""
_MIN_GB_OF_8B = 200
"""Memory of all devices for llama3-8b: 16 bytes per parameter, activations, and a gathered block."""


def speed(setting: Setting) -> dict[str, Any]:
    """Measure step time, MFU and memory, with a trace that `explain` reads."""
    if setting.is_cpu:
        models = {"tiny-gpt2": ("--micro-batch-size", "4", "--ds-config", "zero1")}
    else:
        models = dict(list(_MODELS.items())[:1 if setting.shares_device else None])
        if setting.ranks * setting.device_gb < _MIN_GB_OF_8B:
            models.pop("llama3-8b", None)
    found, runs = [], {}
    for model, options in models.items():
        problems = setting.train(model, "--model", model, *options, "--steps", "25", "--trace-steps", "2",
                                 "--eval-every", "0", "--save-every", "-1", "--sample-tokens", "0", "--log-every",
                                 "5")
        found += problems
        if problems:
            continue
        record = setting.record(model)
        explain = [sys.executable, "-m", "ezpz_llm.explain", str(setting.folder / model), "--json"]
        explained = subprocess.run(explain, capture_output=True, text=True, check=False, timeout=300)
        found += [] if explained.returncode == 0 else [f"explain: {explained.stderr[-300:]}"]
        causes = json.loads(explained.stdout)["causes"][:3] if explained.returncode == 0 else []
        runs[model] = {**{name: record["summary"].get(name) for name in ("step_time", "mfu", "ceiling_share")},
                       "memory": record.get("memory"), "environment": record["environment"],
                       "causes": [(cause["kind"], cause["share"]) for cause in causes]}
    return {"found": found, "runs": runs}


def memory(setting: Setting) -> dict[str, Any]:
    """Record estimated and measured memory of twelve layouts."""
    found, runs = [], {}
    model = (*_SMALL,) if setting.is_cpu else (
        "--model", "gpt2-124m", "--vocab-multiple", "50304", "--micro-batch-size", "8", "--eval-every", "0",
        "--sample-tokens", "0", "--compile", "false")
    for layout in filter(setting.fits, _LAYOUTS):
        problems = setting.train(f"memory-{layout}", *model, "--ds-config", layout, "--steps", "3", "--save-every",
                                 "-1")
        found += problems
        if not problems:
            runs[layout] = setting.record(f"memory-{layout}").get("memory")
    return {"found": found, "runs": runs}


SECTIONS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "collectives": collectives, "certify": certify, "checkpoint": checkpoint, "pipelines": pipelines, "hang": hang,
    "speed": speed, "memory": memory}
