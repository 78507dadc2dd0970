"""Hostile inputs of every kind: none may end in a traceback, hang, fill the memory, or write where it should not.

    python3 tests/helpers/hostile_inputs.py --count 25000 --seed 7      all kinds, in worker processes, as JSON
    python3 tests/helpers/hostile_inputs.py --count 1 --seed 7 --kind ds --from 12    one input, with its traceback

An input follows from the seed, its kind and its number alone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
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

import hostile_data_kinds  # noqa: F401  it enters its kinds among the others
import hostile_kinds
import hostile_names  # noqa: F401  it enters its kinds among the others
import hostile_run_kinds  # noqa: F401  it enters its kinds among the others

from ezpz_llm.base.errors import UserError

HANG_S = 10
"""Of processor time, which a busy machine does not lengthen."""
STUCK_S = 60
"""In which it used none at all: it waits for something that does not come."""
MOST_MEMORY = 1 << 30
_AT_ONCE = 500
_WORKER_S = 3600


class Hang(BaseException):
    """An input took too long."""


@dataclass
class Counts:
    """What became of the inputs of one kind. `killed` are processes that did not come to their end; `outside` are
    files that were opened for writing elsewhere; `slowest_s` is processor time."""

    inputs: int = 0
    accepted: int = 0
    told: int = 0
    tracebacks: int = 0
    hangs: int = 0
    out_of_memory: int = 0
    killed: int = 0
    slowest_s: float = 0.0
    most_mb: int = 0
    places: dict[str, int] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Is nothing wrong with them?"""
        return not (self.tracebacks or self.hangs or self.out_of_memory or self.killed or self.outside
                    or self.most_mb << 20 > MOST_MEMORY)

    def add(self, other: Counts) -> None:
        """Take in another worker's counts of the same kind."""
        for name in ("inputs", "accepted", "told", "tracebacks", "hangs", "out_of_memory", "killed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slowest_s, self.most_mb = max(self.slowest_s, other.slowest_s), max(self.most_mb, other.most_mb)
        self.places = dict(collections.Counter(self.places) + collections.Counter(other.places))
        self.outside = [*self.outside, *other.outside][:10]
        self.examples = [*self.examples, *other.examples][:10]


class Watch:
    """Notes what this process opens for writing, makes, renames or removes beside the folders that are allowed.

    An audit hook cannot be taken away again: it stays, and sleeps between runs.
    """

    _EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate")

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] | None = None
        self.found: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple) -> None:
        if self.allowed is None:
            return
        if event == "open":
            path, _, flags = args
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in self._EVENTS:
            # Of two names the second is the one that is made.
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
            self.found.append(f"{event} {place}")


_watch: Watch | None = None


def run_kind(name: str, seed: int, numbers: Sequence[int], *, shows: bool = False) -> Counts:
    """Read the inputs with these numbers, in this process."""
    global _watch
    _watch = _watch or Watch()
    counts = Counts()
    with _elsewhere() as root, _ended_when_stuck(), hostile_kinds.cached_train_parser():
        for number in numbers:
            folder = root / str(number)
            folder.mkdir()
            _one(name, seed, number, folder, counts, shows)
            shutil.rmtree(folder, ignore_errors=True)
            # In the working directory and HOME, where programs write that are told nothing.
            left = [str(path) for place in _UNTOUCHED for path in (root / place).iterdir()]
            counts.outside += [f"{name} {number}: {what}" for what in (*_watch.found, *left)]
            _watch.found.clear()
            for path in map(Path, left):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return counts


@contextlib.contextmanager
def _ended_when_stuck() -> Iterator[None]:
    """Send the main thread SIGPROF where this process has used no processor time for too long."""
    over = threading.Event()

    def look() -> None:
        used, since = time.process_time(), time.monotonic()
        while not over.wait(1.0):
            # These looks are a little work themselves.
            if time.process_time() - used > 0.1:
                used, since = time.process_time(), time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                since = time.monotonic()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGPROF)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def _one(name: str, seed: int, number: int, folder: Path, counts: Counts, shows: bool) -> None:
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
    except Exception as error:
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
    """The exception and the innermost line of ours."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/ezpz_llm/" in frame.filename]
    last = ours[-1] if ours else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {last.filename.rpartition('ezpz_llm/')[2]}:{last.lineno}"


_UNTOUCHED = ("here", "home")


@contextlib.contextmanager
def _elsewhere() -> Iterator[Path]:
    """A folder for everything: working directory, HOME and cache; hangs end, inputs meet no job's variables."""

    def end(*_: object) -> None:
        raise Hang

    before, here, handler = dict(os.environ), os.getcwd(), signal.signal(signal.SIGPROF, end)
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
    """Read these inputs in a process of their own."""
    words = [sys.executable, __file__, "--kind", name, "--seed", str(seed), "--from", str(numbers.start),
             "--count", str(len(numbers))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_WORKER_S, check=False)
        return Counts(**json.loads(done.stdout)["kinds"][name])
    except (subprocess.TimeoutExpired, ValueError) as error:
        said = f"code {done.returncode}, {done.stderr[-300:]}" if isinstance(error, ValueError) else str(error)
        return Counts(killed=1, examples=[f"{name} {numbers.start} to {numbers.stop - 1}: {said}"])


def run_all(count: int, seed: int, workers: int) -> dict[str, Counts]:
    """`count` inputs over all kinds, some hundred of them in a process."""
    each = -(-count // len(hostile_kinds.KINDS))
    found = {name: Counts() for name in hostile_kinds.KINDS}
    with ThreadPoolExecutor(workers) as pool:
        tasks = [(name, pool.submit(_work, name, seed, range(first, min(first + _AT_ONCE, each))))
                 for name in hostile_kinds.KINDS for first in range(0, each, _AT_ONCE)]
        for name, task in tasks:
            found[name].add(task.result())
    return found


def main() -> int:
    """The command; 1 where an input did what none may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=25_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--kind", choices=sorted(hostile_kinds.KINDS), help="only this one, in this process")
    parser.add_argument("--from", dest="first", type=int, default=0, help="with --kind: the first input's number")
    parser.add_argument("--out", type=Path, help="also write the result there")
    options = parser.parse_args()
    began = time.time()
    if options.kind:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
        numbers = range(options.first, options.first + options.count)
        found = {options.kind: run_kind(options.kind, options.seed, numbers, shows=options.count == 1)}
        found[options.kind].most_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    else:
        found = run_all(options.count, options.seed, options.workers)
    result = {
        "command": f"python3 tests/helpers/hostile_inputs.py --count {options.count} --seed {options.seed}",
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "seconds": round(time.time() - began),
        "inputs": sum(one.inputs for one in found.values()),
        "good": all(one.good for one in found.values()),
        "kinds": {name: asdict(one) for name, one in sorted(found.items())},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if result["good"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
