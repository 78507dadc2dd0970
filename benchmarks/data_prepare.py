"""Measure speed, memory and cost of a kill of data preparation: python3 benchmarks/data_prepare.py

Writes --megabytes of documents (about 5 kB each, from the sources of the standard library) as jsonl and, with
--parquet, as parquet, then
  1. encodes documents in memory with tiktoken in one process, for tiktoken's speed per core;
  2. prepares a fifth of the corpus in one process, and all of it with --workers processes, measuring CPU time, wall
     time and the total memory of all processes;
  3. prepares it again, with SIGKILL to all processes at two points, and compares the shards.
Requires the file of the gpt2 tokenizer (python3 -m ezpz_llm.data tokenizer gpt2 …). Exit code 0 only if the shards
of the killed preparation are identical and memory is below --limit-gb.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.data.atomic_dir import JOURNAL
from ezpz_llm.training.data.corpora import find_corpus
from ezpz_llm.training.data.manifest import read_manifest
from ezpz_llm.training.data.tokenizers import EncodingTokenizer, get_tokenizer

DOCUMENT_BYTES = 5000
FILES = 10


def documents(size: int, seed: int) -> list[str]:
    """Return sequences of lines from the standard library, `size` bytes in total."""
    sources = [file.path.read_text("utf-8").splitlines(keepends=True) for file in find_corpus("stdlib").files]
    generator, texts, total = random.Random(seed), [], 0
    while total < size:
        lines = generator.choice(sources)
        first, text = generator.randrange(len(lines)), ""
        for line in lines[first:]:
            text += line
            if len(text) >= DOCUMENT_BYTES:
                break
        texts.append(text)
        total += len(text.encode())
    return texts


def write_corpus(folder: Path, size: int, parquet: bool) -> int:
    """Write the corpus to ten files, and return the bytes of its texts."""
    folder.mkdir()
    total = 0
    for number in range(FILES):
        texts = documents(size // FILES, number)
        total += sum(len(text.encode()) for text in texts)
        if parquet:
            import pyarrow
            from pyarrow.parquet import write_table

            write_table(pyarrow.table({"text": texts}), folder / f"{number:03d}.parquet", row_group_size=1000)
        else:
            with (folder / f"{number:03d}.jsonl").open("w") as file:
                for text in texts:
                    file.write(json.dumps({"text": text}) + "\n")
    return total


def tiktoken_speed() -> dict[str, float]:
    """Return the speed of `encode_ordinary` on texts in memory, best of three."""
    tokenizer = get_tokenizer("gpt2")
    assert isinstance(tokenizer, EncodingTokenizer)
    encoding = tokenizer.encoding
    texts = documents(20_000_000, 99)
    size, best = sum(len(text.encode()) for text in texts), 0.0
    for _ in range(3):
        began = time.process_time()
        for text in texts:
            encoding.encode_ordinary(text)
        best = max(best, size / (time.process_time() - began))
    return {"text_mb": size / 1e6, "mb_per_cpu_s": best / 1e6}


def prepare(corpus: Path, out: Path, workers: int, kill_at: float | None = None) -> dict[str, Any]:
    """Run the command, and kill all its processes when its journal reaches `kill_at` bytes read."""
    before, began, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0
    running = subprocess.Popen(
        [sys.executable, "-m", "ezpz_llm.data", "prepare", str(corpus), "--tokenizer", "gpt2", "--out", str(out),
         "--shard-tokens", "20000000", "--workers", str(workers)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while running.poll() is None:
        peak = max(peak, memory(running.pid))
        if kill_at is not None and bytes_read(out) >= kill_at:
            os.killpg(running.pid, signal.SIGKILL)
        time.sleep(0.1)
    log = running.communicate()[1]
    if running.returncode != (0 if kill_at is None else -signal.SIGKILL):
        raise SystemExit(f"prepare ended with exit code {running.returncode}: {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"workers": workers, "wall_s": time.monotonic() - began, "peak_memory_gb": peak / 1e9,
            "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
             "went_on": "resuming after" in log}


def bytes_read(out: Path) -> int:
    """Return the bytes read so far, from the journal of an unfinished preparation."""
    journals = list(out.parent.glob(f".{out.name}.partial-*/{JOURNAL}"))
    return json.loads(journals[0].read_text())["source_bytes"] if journals else 0


def memory(pid: int) -> int:
    """Return the resident bytes of a process and its descendants; shared pages count for each process."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def processor() -> str:
    """Return the CPU model, or the architecture if Linux does not report one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    size, tiktokens = arguments.megabytes * 1_000_000, tiktoken_speed()
    print(f"tiktoken alone: {tiktokens['mb_per_cpu_s']:.1f} MB a processor second", flush=True)
    runs = []
    for kind in ("jsonl", "parquet")[:1 + arguments.parquet]:
        few, all_of_it = work / f"few-{kind}", work / kind
        for corpus, share, workers in ((few, size // 5, 1), (all_of_it, size, arguments.workers)):
            text = write_corpus(corpus, share, kind == "parquet")
            run = {"format": kind, "text_mb": text / 1e6} | prepare(corpus, work / f"{corpus.name}-shards", workers)
            run["mb_per_cpu_s"] = text / run["cpu_s"] / 1e6
            run["ratio_to_tiktoken"] = run["mb_per_cpu_s"] / tiktokens["mb_per_cpu_s"]
            run["tokens"] = read_manifest(work / f"{corpus.name}-shards").tokens
            runs.append(run)
            print(f"{kind}, {workers} workers: {run['text_mb']:.0f} MB in {run['wall_s']:.1f} s, "
                  f"{run['mb_per_cpu_s']:.1f} MB a processor second ({run['ratio_to_tiktoken']:.2f} of tiktoken), "
                  f"{run['peak_memory_gb']:.2f} GB", flush=True)
    killed = [prepare(work / "jsonl", work / "killed", arguments.workers, size * share) for share in (0.3, 0.6)]
    last = prepare(work / "jsonl", work / "killed", arguments.workers)
    same = content(work / "jsonl-shards") == content(work / "killed")
    walls = [run["wall_s"] for run in (*killed, last)]
    print(f"killed when 30 % and 60 % were read, after {walls[0]:.1f} s and {walls[1]:.1f} s, ended after "
          f"{walls[2]:.1f} s more; the same shards: {same}", flush=True)
    return {"tiktoken": tiktokens, "runs": runs,
            "killed": {"at_share_read": [0.3, 0.6], "wall_s": walls, "same_to_the_byte": same,
                       "went_on": [run["went_on"] for run in (*killed, last)]}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit-gb", type=float, default=1.5)
    parser.add_argument("--parquet", action="store_true", help="measure parquet, too")
    parser.add_argument("--work", type=Path, help="directory with free space for three times the corpus")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=arguments.work))
    try:
        found = measure(arguments, work)
    finally:
        shutil.rmtree(work)
    peak = max(run["peak_memory_gb"] for run in found["runs"])
    killed = found["killed"]
    passed = killed["same_to_the_byte"] and all(killed["went_on"][1:]) and peak < arguments.limit_gb
    if arguments.out:
        write_json(arguments.out, {
            "command": f"python3 benchmarks/data_prepare.py --megabytes {arguments.megabytes} --workers "
                       f"{arguments.workers}{' --parquet' * arguments.parquet} --out {arguments.out}",
            "date": datetime.date.today().isoformat(), "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "versions": {"python": platform.python_version(),
                         **{name: version(name) for name in ("ezpz_llm", "tiktoken", "numpy")}},
            "limit_gb": arguments.limit_gb, "peak_memory_gb": peak, "passed": passed, **found})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
