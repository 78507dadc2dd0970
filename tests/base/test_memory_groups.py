"""Memory limits of control groups: of the process's own group and of those above it, in versions 1 and 2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slowness import scaled

from ezpz_llm.core.base.memory_groups import kill_counters, usable_memory

_GB = 1 << 30
_V2 = {"limit": "memory.max", "used": "memory.current", "cached": "inactive_file", "kills": "memory.events"}
_V1 = {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes", "cached": "total_inactive_file",
       "kills": "memory.oom_control"}


class _Node:
    """A node with 64 GB of memory, of which 60 are available, and a process in a group."""

    def __init__(self, folder: Path, membership: str) -> None:
        self.membership, self.mounts, self.meminfo = folder / "cgroup", folder / "sys", folder / "meminfo"
        self.membership.write_text(membership)
        self.meminfo.write_text(f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {60 << 20} kB\n")

    def add(self, group: str, names: dict[str, str], limit: str | int, used: int, cached: int = 0) -> None:
        folder = self.mounts / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names["limit"]).write_text(f"{limit}\n")
        (folder / names["used"]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"cache 5\n{names['cached']} {cached}\n")
        (folder / names["kills"]).write_text("oom_kill 0\n")

    @property
    def memory(self) -> tuple[float, float]:
        total, available = usable_memory(self.membership, self.mounts, self.meminfo)
        return total / _GB, available / _GB

    @property
    def counters(self) -> list[str]:
        return [str(path.relative_to(self.mounts)) for path in kill_counters(self.membership, self.mounts)]


def test_a_limit_of_version_2_on_an_ancestor(tmp_path: Path) -> None:
    """Slurm limits the job's group, which is above the step's and the task's."""
    node = _Node(tmp_path, "0::/system.slice/job_7/step_0/task_1\n")
    assert node.memory == (64, 60)
    node.add("system.slice/job_7/step_0/task_1", _V2, "max", 1 * _GB)
    assert node.memory == (64, 60)
    node.add("system.slice", _V2, 48 * _GB, 20 * _GB)
    node_of_job = node.mounts / "system.slice/job_7"
    for name, text in (("memory.max", 8 * _GB), ("memory.current", 5 * _GB)):
        (node_of_job / name).write_text(str(text))
    assert node.memory == (8, 3)
    (node_of_job / "memory.stat").write_text(f"inactive_file {2 * _GB}\n")
    assert node.memory == (8, 5)
    assert node.counters == ["system.slice/job_7/step_0/task_1/memory.events"]


def test_a_limit_of_version_1(tmp_path: Path) -> None:
    node = _Node(tmp_path, "5:cpuset:/\n4:memory:/slurm/uid_0/job_7/step_0\n0::/\n")
    node.add("memory/slurm/uid_0/job_7/step_0", _V1, 9223372036854771712, 1 * _GB)
    assert node.memory == (64, 60)
    for name, text in (("memory.limit_in_bytes", 16 * _GB), ("memory.usage_in_bytes", 6 * _GB)):
        (node.mounts / f"memory/slurm/uid_0/job_7/{name}").write_text(str(text))
    assert node.memory == (16, 10)
    assert node.counters == ["memory/slurm/uid_0/job_7/step_0/memory.oom_control"]


@pytest.mark.parametrize("membership", ["0::/\n", "0::/../other/task\n", "0::/docker/3f2a\n"])
def test_a_container_has_its_group_at_the_root(tmp_path: Path, membership: str) -> None:
    node = _Node(tmp_path, membership)
    node.add("", _V2, 4 * _GB, 1 * _GB)
    assert node.memory == (4, 3)
    assert node.counters == ["memory.events"]


def test_limits_above_that_of_the_node_and_broken_files_are_ignored(tmp_path: Path) -> None:
    node = _Node(tmp_path, "0::/a/b\n")
    node.add("a", _V2, 128 * _GB, 1)
    (node.mounts / "a/b").mkdir()
    (node.mounts / "a/b/memory.max").write_text("many\n")
    assert node.memory == (64, 60)


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """Create a memory group (v1) inside another with a limit of 300 MiB."""
    outer = Path("/sys/fs/cgroup/memory") / f"ezpz_llm-limit-{os.getpid()}"
    try:
        (outer / "step").mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"cannot make a memory cgroup (v1) here: {error}")
    yield outer / "step"
    for group in (outer / "step", outer):
        group.rmdir()


def test_the_limit_of_a_real_group(limited_group: Path) -> None:
    enter = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(limited_group / "cgroup.procs"))
    code = "from ezpz_llm.core.base.memory_groups import usable_memory as read; print(*read())"
    done = subprocess.run([*enter, sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=scaled(60), check=True)
    total, available = map(int, done.stdout.split())
    assert total == 300 << 20
    assert 0 < available < total
