"""Run the tests of model, engine, dist, data and trainer, and every layout, with other dependency versions.

    python3 tests/helpers/version_matrix.py [oldest] [newest] [oldest@3.12 …] [--folder DIR] [--write]

Creates an environment from the package index for each NAME: `oldest` has the lowest versions that pyproject.toml
allows, `newest` the highest; @ selects another Python. Each takes 6 GB and half an hour. Environments in DIR are
updated and used again. --write puts the results into the table of benchmarks/results/versions.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from places import ROOT, TESTS

PAGE = ROOT / "benchmarks" / "results" / "versions.md"
PYTHONS = {"oldest": "3.10", "newest": "3.13"}
SHOWN = ("torch", "deepspeed", "numpy", "tiktoken")
BUILT_BY_HAND = ("mpi4py",)
"""Packages whose oldest release has no wheel; building mpi4py needs an MPI library."""
PACKAGES = ("model", "layout", "engine", "dist", "data", "checkpoint", "trainer")
FULL = ("model_init", "engine_deepspeed", "step_skip", "sharded_start", "compiled_layouts", "dist_parts",
        "dist_setup", "trainer_guards")
"""Files whose `full` tests also run: they depend most on the internals of torch and DeepSpeed."""
LAYOUTS = {"ddp": 2, "fsdp2": 2, "zero0": 2, "zero1": 2, "zero2": 2, "zero3": 2, "tp2": 2, "pp2": 2, "sp2": 2,
           "tiled": 2, "fsdp2_within2": 4, "zero3_hpz2": 4, "tp2_zero1": 4, "tp2_zero3": 4, "pp2_tp2": 4, "3d": 8}
"""Layouts that need no compiled op, with their number of ranks."""
IN_BF16 = ("ddp", "fsdp2", "zero2", "zero3")
"""Layouts also run with --precision bf16: one for each engine and each of its DeepSpeed optimizers."""
SHORT = ("--device", "cpu", "--model", "tiny-llama", "--n-layer", "2", "--n-embd", "64", "--n-head", "4",
         "--block-size", "64", "--eval-tokens", "1024", "--steps", "4", "--log-every", "1", "--save-every", "2")


def main() -> int:
    """Run the command. Return 0 if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PYTHONS), metavar="NAME",
                        help="oldest or newest (default: both), with @ for another Python: newest@3.12")
    parser.add_argument("--folder", type=Path, help="folder for the environments (default: a temporary one)")
    parser.add_argument("--write", action="store_true", help="update the table of benchmarks/results/versions.md")
    options = parser.parse_args()
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="versions-"))).absolute()
    failed = False
    try:
        for name in options.names:
            which, _, version = name.partition("@")
            python = make(folder / name, version or PYTHONS[which], list(requirements(which == "oldest")))
            line, good = examine(python, name)
            failed |= not good
            print(line, flush=True)
            if options.write:
                write(line, name)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    return int(failed)


def requirements(oldest: bool) -> Iterator[str]:
    """Yield pip's requirements, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    blocks = re.findall(r"^(?:dependencies|train) = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    for word in re.findall(r'^    "(.*)",', "".join(blocks), re.MULTILINE):
        name = re.match(r"[\w-]+", word)[0]
        yield re.sub(r">=([\d.]+)(,<[\d.]+)?", r"==\1", word) if oldest and name not in BUILT_BY_HAND else word
    yield from ("mpich>=4.2", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "hypothesis>=6.100",
                "matplotlib>=3.8")


def make(folder: Path, version: str, words: list[str]) -> Path:
    """Create an environment with these packages and this checkout. Return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([find_python(version), "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    subprocess.run([*pip, "-U", "pip"], check=True, env=environment)
    subprocess.run([*pip, "-U", *words], check=True, env=environment)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True, env=environment)
    return python


def find_python(version: str) -> str:
    """Return a Python of this version, from PATH or pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in (shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")):
        if python and subprocess.run([str(python), "-c", ""], capture_output=True, check=False).returncode == 0:
            return str(python)
    raise SystemExit(f"no Python {version}: install it, or put it on PATH as python{version}")


def examine(python: Path, name: str) -> tuple[str, bool]:
    """Run everything in an environment. Return a line of the table, and True if all passed."""
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                   "OMP_WAIT_POLICY": "PASSIVE", "VIRTUAL_ENV": str(python.parent.parent)}
    environment.pop("PYTHONPATH", None)
    code = "import importlib.metadata as m, platform; print(platform.python_version(), " \
           f"*map(m.version, {SHOWN}))"
    versions = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    fast, fine = tests(python, environment, "not full and not slow and not cluster",
                       [TESTS / package for package in PACKAGES])
    full, also_fine = tests(python, environment, "full and not cluster",
                            [next(TESTS.rglob(f"test_{file}.py")) for file in FULL])
    tried = {layout: train(python, layout, ranks, environment) for layout, ranks in LAYOUTS.items()}
    tried |= {f"{layout} in bf16": train(python, layout, LAYOUTS[layout], environment, "--precision", "bf16")
              for layout in IN_BF16}
    wrong = {layout: failure for layout, failure in tried.items() if failure is not None}
    trained = [f"{len(tried) - len(wrong)} of {len(tried)}",
               *(f"{run}: {failure}" for run, failure in wrong.items())]
    cells = [name, *versions, f"{fast}; full: {full}", "; ".join(trained),
             f"{datetime.datetime.now(datetime.timezone.utc).date()}"]
    trains = all("refused" in failure for failure in wrong.values())
    return f"| {' | '.join(cells)} |", fine and also_fine and trains


def tests(python: Path, environment: dict[str, str], marked: str, places: list[Path]) -> tuple[str, bool]:
    """Run pytest. Return its summary line, and True if all tests passed."""
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked, *places]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr, flush=True)
    return re.sub(r" in [\d.]+s.*", "", done.stdout.strip().rpartition("\n")[2]), done.returncode == 0


def train(python: Path, layout: str, ranks: int, environment: dict[str, str], *options: str) -> str | None:
    """Run a short training under this layout. Return the failure, or None."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [python, "-m", "ezpz_llm.launch", "-n", str(ranks), "--run-dir", f"{folder}/run"]
        command = [*launch, python, "-m", "ezpz_llm.train", "--ds-config", layout, *SHORT, *options]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600,
                              check=False)
    if done.returncode == 0:
        return None
    print(layout, done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr, flush=True)
    error = re.search(r"^error: (.*)", done.stderr, re.MULTILINE)
    return f"refused ({error[1]})" if error and done.returncode == 2 else f"code {done.returncode}"


def write(line: str, name: str) -> None:
    """Replace the line of that name in the page's table, or append it."""
    lines = PAGE.read_text().splitlines()
    rows = [number for number, text in enumerate(lines) if text.startswith("|")]
    same = [number for number in rows if lines[number].startswith(f"| {name} |")]
    if same:
        lines[same[0]] = line
    else:
        lines.insert(rows[-1] + 1, line)
    PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
