"""Run tests that measure, and update the committed results, pages and tables.

    python3 benchmarks/record.py NAME [PYTEST ARGUMENTS]

Without a name, lists the names. Usually these tests only compare and assert; here the fixture `recording` is True,
and they write their results. Most require root and the packages of simulated nodes (docs/evidence/testing.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALL = ("-m", "full or slow or not full")
RECORDS = {
    "cluster-matrix": ("benchmarks/results/cluster_matrix.json", *ALL, "-k", "on_nodes",
                       "tests/launch/test_cluster_launch.py"),
    "deepspeed-keys": ("ezpz_llm/training/layout/deepspeed_keys.json", *ALL, "-k", "table_of_keys",
                       "tests/layout/test_ds_config.py"),
    "faults": ("benchmarks/results/faults.md", *ALL, "tests/launch/test_cluster_faults.py"),
    "foreign-scripts": ("benchmarks/results/foreign_scripts.json", *ALL, "-k", "test_a_script_of",
                        "tests/launch/test_foreign_scripts.py"),
    "kills": ("benchmarks/results/kills.json", "-m", "slow", "tests/checkpoint/test_checkpoint_kills.py"),
    "layout-links": ("benchmarks/results/layout_links.json and benchmarks/results/traffic.md", "-m", "slow",
                     "tests/observe/test_traffic_layouts.py"),
    "layouts-page": ("benchmarks/results/layouts_command.md", *ALL, "-k", "page",
                     "tests/layout/test_layouts_command.py"),
    "parameters-page": ("benchmarks/results/parameters.md", *ALL, "-k", "page_has_the_table",
                        "tests/model/test_model_parameter_table.py"),
    "planted-failures": ("benchmarks/results/planted_failures.md and the second score in"
                         " benchmarks/results/blind_failures.json", *ALL, "tests/launch/test_planted_failures.py"),
    "resume-matrix": ("benchmarks/results/resume_matrix.json", "-m", "slow",
                      "tests/checkpoint/test_checkpoint_layouts.py"),
    "scaling-links": ("benchmarks/results/scaling_links.json", "-m", "slow", "-k", "bandwidth",
                      "tests/scaling/test_scale_cluster.py"),
    "traffic": ("ezpz_llm/training/observe/traffic_gloo.json and benchmarks/results/traffic.md", "-m", "slow",
                "tests/observe/test_traffic.py"),
    "training-loops": ("benchmarks/results/training_loops.md", "-m", "full", "-k", "every_cell",
                       "tests/library/test_training_loops.py"),
}


class Recording:
    """Pytest plugin whose presence makes the fixture `recording` True."""

    __name__ = "recording"


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in RECORDS:
        print(__doc__, *(f"{name:16} writes {written}" for name, (written, *_) in RECORDS.items()), sep="\n")
        return 2
    name, *more = arguments
    written, *words = RECORDS[name]
    print(f"{name}: writes {written}", flush=True)
    return pytest.main([f"--rootdir={ROOT}", "-n0", *words[:-1], str(ROOT / words[-1]), *more],
                       plugins=[Recording()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
