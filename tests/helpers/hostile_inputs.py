"""Read hostile inputs of every kind: none may cause a traceback, a hang, high memory use, or a stray write.

    python3 tests/helpers/hostile_inputs.py --count 25000 --seed 7      all kinds, in worker processes; prints JSON
    python3 tests/helpers/hostile_inputs.py --count 1 --seed 7 --kind ds --from 12    one input, with its traceback

An input is determined by the seed, its kind and its number.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import hostile_data_kinds  # noqa: F401  registers its kinds
import hostile_kinds
import hostile_names  # noqa: F401  registers its kinds
import hostile_run_kinds  # noqa: F401  registers its kinds
import hostile_study_kinds  # noqa: F401  registers its kinds

from ezpz_llm.core.base.errors import UserError

HANG_S = 10
"""Processor time after which an input counts as hung; unlike wall time, it is independent of the load."""
STUCK_S = 60
"""Wall time without any processor time after which an input counts as hung: it waits for something."""
MOST_MEMORY = 200 << 20
"""Bytes that the inputs of a kind may add to the process, which has imported its modules."""
_IMPORTS_TORCH = ("callback", "weights")
_AT_ONCE = 500
_WORKER_S = 3600


class Hang(BaseException):
    """Raised in a reader that exceeds a time limit."""


@dataclass
class Counts:
    """Results for the inputs of one kind.

    Attributes:
        told: inputs rejected with an error message.
        killed: worker processes that did not finish.
        outside: files that were opened for writing outside the allowed folder.
        slowest_s: the longest processor time of an input.
        added_mb: peak memory of the process, without that of its imports.
    """

    inputs: int = 0
    accepted: int = 0
    told: int = 0
    tracebacks: int = 0
    hangs: int = 0
    out_of_memory: int = 0
    killed: int = 0
    slowest_s: float = 0.0
    added_mb: int = 0
    places: dict[str, int] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """True if no input misbehaved."""
        return not (self.tracebacks or self.hangs or self.out_of_memory or self.killed or self.outside
                    or self.added_mb << 20 > MOST_MEMORY)

    def add(self, other: Counts) -> None:
        """Add another worker's counts of the same kind."""
        for name in ("inputs", "accepted", "told", "tracebacks", "hangs", "out_of_memory", "killed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slowest_s, self.added_mb = max(self.slowest_s, other.slowest_s), max(self.added_mb, other.added_mb)
        self.places = dict(collections.Counter(self.places) + collections.Counter(other.places))
        self.outside = [*self.outside, *other.outside][:10]
        self.examples = [*self.examples, *other.examples][:10]


class Watch:
    """Record of files that this process writes, creates, renames or removes outside the allowed folders.

    An audit hook cannot be removed, so it stays installed and is inactive between inputs.
    """

    _EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate")

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] | None = None
        self.stray: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple) -> None:
        if self.allowed is None:
            return
        if event == "open":
            path, _, flags = args
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in self._EVENTS:
            # Of two paths, the second is the one that is created.
            path = args[event in ("os.rename", "os.symlink", "os.link")]
        else:
            return
        if isinstance(path, int) or path is None:
            return
        place = os.path.abspath(os.fsdecode(path))
        if (
            not place.startswith((*self.allowed, "/dev/null", "/dev/tty", "/proc/self"))
            and "__pycache__" not in place
        ):
            self.stray.append(f"{event} {place}")


_watch: Watch | None = None


def run_kind(name: str, seed: int, numbers: Sequence[int], *, shows: bool = False) -> Counts:
    """Read the inputs with the given numbers in this process."""
    global _watch
    _watch = _watch or Watch()
    counts = Counts()
    with _elsewhere() as root, _ended_when_stuck(), hostile_kinds.cached_train_parser():
        for number in numbers:
            folder = root / str(number)
            folder.mkdir()
            _read_input(name, seed, number, folder, counts, shows)
            shutil.rmtree(folder, ignore_errors=True)
            # Programs write to the working directory and HOME by default.
            left = [str(path) for place in _UNTOUCHED for path in (root / place).iterdir()]
            counts.outside += [f"{name} {number}: {entry}" for entry in (*_watch.stray, *left)]
            _watch.stray.clear()
            for path in map(Path, left):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return counts


@contextlib.contextmanager
def _ended_when_stuck() -> Iterator[None]:
    """Send the main thread SIGPROF if this process uses no processor time for STUCK_S."""
    over = threading.Event()

    def watch_cpu_time() -> None:
        used, since = time.process_time(), time.monotonic()
        while not over.wait(1.0):
            # The polling itself uses some processor time.
            if time.process_time() - used > 0.1:
                used, since = time.process_time(), time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                since = time.monotonic()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGPROF)

    watcher = threading.Thread(target=watch_cpu_time, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _read_input(name: str, seed: int, number: int, folder: Path, counts: Counts, shows: bool) -> None:
    counts.inputs += 1
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    _watch.allowed = (str(folder.parent),)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            hostile_kinds.KINDS[name](Random(f"{seed} {name} {number}"), folder)
        counts.accepted += 1
    except (UserError, SystemExit) as error:
        str(error).encode("utf-8", "backslashreplace")
        counts.told += 1
    except Hang:
        counts.hangs += 1
        counts.examples.append(f"{name} {number}: hang")
    except MemoryError:
        counts.out_of_memory += 1
        counts.examples.append(f"{name} {number}: memory")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also a panic of a library in Rust
        if shows:
            traceback.print_exc()
        counts.tracebacks += 1
        place = _place(error)
        counts.places[place] = counts.places.get(place, 0) + 1
        counts.examples.append(f"{name} {number}: {type(error).__name__}")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _watch.allowed = None
    counts.slowest_s = max(counts.slowest_s, round(time.process_time() - began, 2))


def _place(error: BaseException) -> str:
    """Return the exception's type and the innermost line of this package."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/ezpz_llm/" in frame.filename]
    last = ours[-1] if ours else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {last.filename.rpartition('ezpz_llm/')[2]}:{last.lineno}"


_UNTOUCHED = ("here", "home")


@contextlib.contextmanager
def _elsewhere() -> Iterator[Path]:
    """Move working directory, HOME and cache to a temporary folder; hide a job's variables; SIGPROF raises Hang."""

    def raise_hang(*_: object) -> None:
        raise Hang

    before, here, handler = dict(os.environ), os.getcwd(), signal.signal(signal.SIGPROF, raise_hang)
    with tempfile.TemporaryDirectory(prefix="hostile-") as root:
        for name in [
            name for name in os.environ if name.startswith(("SLURM", "PBS", "PMI", "EZPZ", "RANK", "WORLD"))
        ]:
            del os.environ[name]
        for place in _UNTOUCHED:
            os.mkdir(f"{root}/{place}")
        os.environ |= {
            "HOME": f"{root}/home",
            "EZPZ_LLM_CACHE": f"{root}/cache",
            "XDG_CACHE_HOME": f"{root}/cache",
            "TMPDIR": root,
            "COLUMNS": "100",
        }
        os.chdir(f"{root}/here")
        try:
            yield Path(root)
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)
            signal.signal(signal.SIGPROF, handler)


def _work(name: str, seed: int, numbers: range) -> Counts:
    """Read these inputs in a new process."""
    words = [sys.executable, __file__, "--kind", name, "--seed", str(seed), "--from", str(numbers.start),
             "--count", str(len(numbers))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_WORKER_S, check=False)
        return Counts(**json.loads(done.stdout)["kinds"][name])
    except (subprocess.TimeoutExpired, ValueError) as error:
        reason = f"code {done.returncode}, {done.stderr[-300:]}" if isinstance(error, ValueError) else str(error)
        return Counts(killed=1, examples=[f"{name} {numbers.start} to {numbers.stop - 1}: {reason}"])


def run_all(count: int, seed: int, workers: int) -> dict[str, Counts]:
    """Read `count` inputs, spread evenly over all kinds, at most 500 in one process."""
    each = -(-count // len(hostile_kinds.KINDS))
    results = {name: Counts() for name in hostile_kinds.KINDS}
    with ThreadPoolExecutor(workers) as pool:
        tasks = [(name, pool.submit(_work, name, seed, range(first, min(first + _AT_ONCE, each))))
                 for name in hostile_kinds.KINDS for first in range(0, each, _AT_ONCE)]
        for name, task in tasks:
            results[name].add(task.result())
    return results


def main() -> int:
    """Run the command. Return 1 if an input misbehaved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=25_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--kind", choices=sorted(hostile_kinds.KINDS), help="read only this kind, in this process")
    parser.add_argument("--from", dest="first", type=int, default=0, help="with --kind: the first input's number")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    began = time.time()
    if options.kind:
        if options.kind in _IMPORTS_TORCH:
            importlib.import_module("torch")
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
        base_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        numbers = range(options.first, options.first + options.count)
        results = {options.kind: run_kind(options.kind, options.seed, numbers, shows=options.count == 1)}
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        results[options.kind].added_mb = peak_mb - base_mb
    else:
        results = run_all(options.count, options.seed, options.workers)
    result = {
        "command": f"python3 tests/helpers/hostile_inputs.py --count {options.count} --seed {options.seed}",
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "seconds": round(time.time() - began),
        "inputs": sum(counts.inputs for counts in results.values()),
        "good": all(counts.good for counts in results.values()),
        "kinds": {name: asdict(counts) for name, counts in sorted(results.items())},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if result["good"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
