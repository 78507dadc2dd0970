"""The suite for several ranks, on CPU ranks, with and without planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import TESTS
from slowness import scaled

SUITE = TESTS / "gpu" / "several" / "suite.py"
# A fault, the section that must find it, and what it then says.
PLANTED = [
    ("wrong_values", "collectives", "wrong values"), ("skipped_collective", "certify", "different collectives"),
    ("stale_checkpoint", "checkpoint", "after a resume under fsdp2, the loss of step"),
    ("wrong_send_order", "certify", "pp2 "), ("wrong_group", "certify", "tp2_zero1 fp32: "),
]


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the suite on two CPU ranks; return its exit code and sections."""
    command = [sys.executable, str(SUITE), "--ranks", "2", "--device", "cpu", "--out", str(folder / "out.json"),
               *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(3000), check=False)
    assert (folder / "out.json").is_file(), done.stderr
    return done.returncode, json.loads((folder / "out.json").read_text())["sections"]


@pytest.mark.full
@pytest.mark.timeout(scaled(3600))
def test_suite_passes_on_cpu_ranks(tmp_path: Path) -> None:
    code, sections = run(tmp_path, "--minutes", str(scaled(20)))
    assert code == 0, {name: section["found"] for name, section in sections.items()}
    assert set(sections) == {"collectives", "certify", "checkpoint", "pipelines", "hang", "speed", "memory"}
    assert len(sections["memory"]["runs"]) == 12
    assert sections["speed"]["runs"]["tiny-gpt2"]["step_time"]["median"] > 0


@pytest.mark.full
@pytest.mark.parametrize(("fault", "section", "text"), PLANTED, ids=[fault for fault, _, _ in PLANTED])
def test_planted_fault_is_found(tmp_path: Path, fault: str, section: str, text: str) -> None:
    code, sections = run(tmp_path, "--only", section, "--plant", fault)
    assert code == 1
    assert any(text in line for line in sections[section]["found"]), sections[section]["found"]


@pytest.mark.full
def test_collectives_pass_with_gloo_for_device_tensors(tmp_path: Path) -> None:
    code, sections = run(tmp_path, "--only", "collectives", "--gloo")
    assert code == 0, sections["collectives"]["found"]


def test_page_has_a_row_for_each_file() -> None:
    program = ("import json, sys; sys.path.insert(0, sys.argv[1])\n"
               "import suite; print(suite.page([json.loads(sys.argv[2])]))")
    result = {"date": "2026-12-01", "devices": 8, "device": "cuda", "ranks": 8, "sections": {
        "hang": {"passed": False, "found": ["launch did not end the hang: exit code 1"]},
        "speed": {"passed": True, "found": [], "runs": {"gpt2-124m": {"mfu": 0.47}, "llama3-1b": {"mfu": 0.6}}}}}
    page = subprocess.run([sys.executable, "-c", program, str(SUITE.parent), json.dumps(result)], check=True,
                          capture_output=True, text=True, timeout=scaled(60)).stdout
    assert "| 2026-12-01 | 8 x cuda | 8 | 1 of 2 | hang: launch did not end the hang: exit code 1 | 60.0% |" in page
