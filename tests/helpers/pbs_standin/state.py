"""State of the stand-in: its nodes, and a file for each job with the fields of `qstat -f`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator
from pathlib import Path


class Home:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.nodes: dict[str, int] = json.loads((path / "nodes.json").read_text())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        with (self.path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def file(self, job_id: str, kind: str = "json") -> Path:
        return self.path / "jobs" / f"{job_id}.{kind}"

    def read(self, job_id: str) -> dict | None:
        file = self.file(job_id)
        return json.loads(file.read_text()) if file.exists() else None

    def write(self, job_id: str, fields: dict) -> None:
        new = self.file(job_id, "new")
        new.write_text(json.dumps(fields))
        new.replace(self.file(job_id))

    def update(self, job_id: str, **fields: object) -> None:
        self.write(job_id, {**(self.read(job_id) or {}), **fields})

    def jobs(self) -> dict[str, dict]:
        jobs = {path.name[:-5]: json.loads(path.read_text()) for path in (self.path / "jobs").glob("*.json")}
        return dict(sorted(jobs.items(), key=lambda item: [int(word) for word in re.findall(r"\d+", item[0])]))

    def next_number(self) -> int:
        return 1 + max((int(re.match(r"\d+", job)[0]) for job in self.jobs()), default=-1)

    def taken(self) -> list[tuple[str, int]]:
        """Return node and CPUs of every running chunk."""
        return [(host, int(cpus)) for job in self.jobs().values() if job["job_state"] == "R"
                for host, cpus in re.findall(r"\(([^:()]+):ncpus=(\d+)\)", job.get("exec_vnode", ""))]


def place(home: Home, select: str, how: str) -> list[tuple[str, int, dict]] | None:
    """Return node, slot and request of every chunk; None if they do not fit at present."""
    taken = home.taken()
    chosen: list[tuple[str, int, dict]] = []
    for chunk in chunks_of(select):
        for host, size in home.nodes.items():
            used = [cpus for name, cpus in taken if name == host]
            mine = [request for name, _, request in chosen if name == host]
            full = sum(used) + sum(request["ncpus"] for request in mine) + chunk["ncpus"] > size
            if not (full or ("scatter" in how and mine) or ("excl" in how and used)):
                chosen.append((host, len(used) + len(mine), chunk))
                break
        else:
            return None
    return chosen


def chunks_of(select: str) -> list[dict]:
    chunks = []
    for part in str(select).split("+"):
        words = part.split(":")
        count, pairs = (int(words[0]), words[1:]) if words[0].isdigit() else (1, words)
        wanted = dict(pair.split("=", 1) for pair in pairs)
        chunk = {name: int(wanted.get(name, 1)) for name in ("ncpus", "mpiprocs")}
        chunk["ompthreads"] = int(wanted.get("ompthreads", chunk["ncpus"]))
        chunks += [chunk] * count
    return chunks
