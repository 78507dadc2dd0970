"""Call `ezpz-llm scale` for the tests of studies, with a training run that takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launch_runs import clean_env
from slowness import scaled

TRAIN = (sys.executable, "-m", "ezpz_llm.train", "--n-layer", "1", "--n-embd", "32", "--block-size", "32",
         "--eval-tokens", "512", "--precision", "fp32", "--device", "cpu", "--log-every", "5")


def start(folder: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    """Start `ezpz-llm scale WORDS` in `folder`."""
    return subprocess.Popen([sys.executable, "-m", "ezpz_llm.scale", *words], cwd=folder,
                            env=clean_env(OMP_WAIT_POLICY="PASSIVE", COLUMNS="100") | env, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def scale(folder: Path, *words: str, timeout: float = 200, **env: str) -> tuple[int, str]:
    """Run `ezpz-llm scale WORDS` to its end. Return its exit code and output."""
    running = start(folder, *words, **env)
    try:
        output, _ = running.communicate(timeout=scaled(timeout))
    finally:
        if running.poll() is None:
            running.terminate()
            running.wait(scaled(60))
    return running.returncode, output
