"""List lines of a training step, a save, a load, or an evaluation that no case of certify runs on several ranks.

    python3 benchmarks/certify_coverage.py certify --out FOLDER    # all cases with several ranks, in three steps
    python3 benchmarks/certify_coverage.py quick --out FOLDER      # the cases of --quick
    python3 benchmarks/certify_coverage.py tests --out FOLDER      # the default tests, for the columns below
    python3 benchmarks/certify_coverage.py list --out FOLDER       # write the lists again, from the latest runs

Needs `pip install coverage`. Every process is measured (coverage_start/sitecustomize.py), with a context for each
case. A line counts as run if a case with several ranks, or the setup of its ranks, ran it. The single process of
certify does not count.

Results in FOLDER: uncovered.txt and uncovered.json, with a row for consecutive lines of a function. First come
lines that a layout case should run, then other lines by reason (certify_coverage_reasons.py). Columns:

    entered    True if a case with several ranks runs other lines of the function
    error      True if the lines raise an error
    certify    "one process" if certify runs the lines in its checks of a single process, else "no"
    tests      "ranks", "threads", "one process", or "no": where the default tests run the lines; "" without a run
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coverage
from certify_coverage_reasons import REASONS

from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.layout import ds_config
from ezpz_llm.verify.certify import recipe
from ezpz_llm.verify.certify.cases import all_cases

ROOT = Path(__file__).resolve().parents[1]
START = ROOT / "benchmarks" / "coverage_start"
TRAINING = ROOT / "ezpz_llm" / "training"
PACKAGES = ("engine", "model", "dist", "checkpoint", "data", "evaluate", "layout")
SEVERAL, THREADS = r"^(case (?!1 )|ranks)", "^threads"
"""Contexts of processes with several ranks, and of ranks that are threads; see coverage_start/sitecustomize.py."""


@dataclass(frozen=True)
class Lines:
    """Consecutive uncovered statements of a function; `text` is the first line.

    The last four columns are described above.
    """

    package: str
    file: str
    first: int
    last: int
    function: str
    text: str
    entered: bool
    error: bool
    certify: str
    tests: str

    @property
    def elsewhere(self) -> str:
        """Reason why no layout case should run the lines; "" if one should."""
        if self.error:
            return "error messages"
        key = f"{self.file}:{self.function}:{self.text}"
        matching = {pattern: why for why, patterns in REASONS.items() for pattern in patterns
                    if fnmatch.fnmatchcase(key, pattern)}
        return matching[max(matching, key=len)] if matching else ""

    def __str__(self) -> str:
        span = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        marks = ["" if self.entered else "not entered", f"certify: {self.certify}" if self.certify != "no" else "",
                 f"tests: {self.tests}" if self.tests else ""]
        return f"  {span:<9} {self.function:<44} {self.text[:70]:<70}  {', '.join(filter(None, marks))}".rstrip()


def measure(commands: Iterable[list[str]], out: Path, name: str) -> int:
    """Run commands with coverage in every process, and combine the data to `name`.coverage.

    Returns:
        The first exit code that is not 0, or 0.
    """
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = os.environ.get("PYTHONPATH")
    include = ":".join(f"{TRAINING}/{package}/*" for package in PACKAGES)
    code = 0
    for command in commands:
        process = subprocess.Popen(command, cwd=ROOT, env={
            **os.environ, "CERTIFY_COVERAGE_DATA": str(folder / "data"), "CERTIFY_COVERAGE_INCLUDE": include,
            "PYTHONPATH": f"{START}:{paths}" if paths else str(START)})
        try:
            code = process.wait() or code
        except KeyboardInterrupt:
            process.terminate()  # certify stops its ranks
            process.wait()
            raise
    combined = out / f"{name}.coverage"
    combined.unlink(missing_ok=True)
    total = coverage.Coverage(data_file=str(combined), config_file=False)
    total.combine(sorted(map(str, folder.iterdir())), strict=True, keep=True)
    total.save()
    return code


def certificates(run_dir: Path, quick: bool) -> Iterator[list[str]]:
    """Yield certify's commands: one for --quick, or one for each world size, with the same references."""
    command = [sys.executable, "-m", "ezpz_llm.certify", "--device", "cpu", "--steps", "3", "--run-dir"]
    if quick:
        yield [*command, str(run_dir), "--quick"]
        return
    cases = all_cases(ds_config.names(), None, recipe.ALL_MODELS, recipe.DTYPES)
    references: Path | None = None
    for world, group in itertools.groupby([case for case in cases if case.world > 1], lambda case: case.world):
        layouts, models = zip(*((case.layout, case.model) for case in group), strict=True)
        folder = run_dir / f"{world}-ranks"
        if references is not None:
            shutil.copytree(references, folder / "reference")
        yield [*command, str(folder), "--world", str(world), "--layouts", ",".join(dict.fromkeys(layouts)),
               "--model", ",".join(dict.fromkeys(models))]
        references = folder / "reference"


class Runs:
    """Lines that a run executed, by file and context."""

    def __init__(self, path: Path) -> None:
        self._coverage = coverage.Coverage(data_file=str(path), config_file=False)
        self._coverage.load()

    def statements(self, path: Path) -> list[int]:
        """Return the first lines of a file's statements."""
        return self._coverage.analysis2(str(path))[1]

    def lines(self, path: Path, contexts: str) -> set[int]:
        """Return the statements of a file that ran in contexts that match a pattern."""
        self._coverage.get_data().set_query_contexts([contexts])
        _, statements, _, missing, _ = self._coverage.analysis2(str(path))
        return set(statements) - set(missing)


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield name, first and last line of the body of each function, outer functions first."""
    for node in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{outer}.{node.name}".removeprefix(".")
            if not isinstance(node, ast.ClassDef):
                yield name, node.body[0].lineno, node.end_lineno or node.lineno
        yield from functions(node, name)


def _error_lines(node: ast.AST) -> range:
    """Return the lines of a statement that raises an error, or the first line of a handler that does so."""
    if isinstance(node, ast.Raise):
        return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    if isinstance(node, ast.ExceptHandler) and any(isinstance(each, ast.Raise) for each in ast.walk(node)):
        return range(node.lineno, node.lineno + 1)
    return range(0)


def uncovered(path: Path, certify: Runs, tests: Runs | None) -> Iterator[Lines]:
    """Yield the uncovered lines of a file."""
    source = path.read_text()
    tree, texts = ast.parse(source), source.splitlines()
    raised = {line for node in ast.walk(tree) for line in _error_lines(node)}
    places: dict[int, str] = {}
    for name, first, last in functions(tree):
        places.update(dict.fromkeys(range(first, last + 1), name))
    covered = certify.lines(path, SEVERAL)
    entered = {places[line] for line in covered if line in places}

    def column(runs: Runs, several: str) -> dict[int, str]:
        """Return where a run executed each line; `several` is the name of several ranks."""
        return {**dict.fromkeys(runs.lines(path, "."), "one process"),
                **dict.fromkeys(runs.lines(path, THREADS), "threads"),
                **dict.fromkeys(runs.lines(path, SEVERAL), several)}

    by_certify, by_tests = column(certify, ""), {} if tests is None else column(tests, "ranks")
    file = path.relative_to(TRAINING).as_posix()
    block: Lines | None = None
    for line in certify.statements(path):
        if line in covered or line not in places:
            block, ended = None, block
        else:
            found = Lines(file.partition("/")[0], file, line, line, places[line], texts[line - 1].strip(),
                          places[line] in entered, line in raised, by_certify.get(line, "no"),
                          "" if tests is None else by_tests.get(line, "no"))
            ended = block
            if block is not None and _key(block) == _key(found):
                block, ended = Lines(**{**asdict(block), "last": line}), None
            else:
                block = found
        if ended is not None:
            yield ended
    if block is not None:
        yield block


def _key(lines: Lines) -> tuple[Any, ...]:
    return lines.function, lines.error, lines.certify, lines.tests


def write_lists(out: Path) -> None:
    """Write uncovered.json and uncovered.txt from the data of the latest runs."""
    certify = Runs(out / "certify.coverage")
    tests = Runs(out / "tests.coverage") if (out / "tests.coverage").is_file() else None
    rows = [row for package in PACKAGES for path in sorted((TRAINING / package).rglob("*.py"))
            for row in uncovered(path, certify, tests)]
    write_json(out / "uncovered.json", [{**asdict(row), "elsewhere": row.elsewhere} for row in rows])
    lines = []
    for why, group in itertools.groupby(sorted(rows, key=lambda row: row.elsewhere), lambda row: row.elsewhere):
        lines += ["", f"# {why or 'no layout case runs these lines on several ranks'}"]
        for file, blocks in itertools.groupby(group, lambda row: row.file):
            lines += ["", file, *map(str, blocks)]
    (out / "uncovered.txt").write_text("\n".join(lines[1:]) + "\n")
    missing = sum(row.elsewhere == "" for row in rows)
    print(f"{missing} of {len(rows)} blocks of uncovered lines belong into a layout case: {out / 'uncovered.txt'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=("certify", "quick", "tests", "list"))
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out, code = given.out.resolve(), 0
    if given.run == "tests":
        code = measure([[sys.executable, "-m", "pytest"]], out, "tests")
    elif given.run != "list":
        shutil.rmtree(out / "run", ignore_errors=True)
        code = measure(certificates(out / "run", given.run == "quick"), out, "certify")
    write_lists(out)
    return code


if __name__ == "__main__":
    sys.exit(main())
