"""Values of collectives are checked in real groups, and each kind of wrong value is found on its rank."""

from __future__ import annotations

from pathlib import Path

from launch_runs import need_mpiexec
from places import HELPERS
from rank_jobs import results_of

from ezpz_llm.training.dist.collective_values import KINDS


def test_each_wrong_kind_is_found_on_its_rank(tmp_path: Path) -> None:
    need_mpiexec()
    runs = ["none", "none@ends", *KINDS, "all-to-all@ends", "none@sequences", "all-to-all@sequences"]
    results = results_of(HELPERS / "collective_value_ranks.py", tmp_path, runs, 3)
    assert results["none"] == results["none@ends"] == [[], [], []]
    for kind in KINDS:
        dtypes = ("fp32",) if kind in ("all-reduce", "reduce-scatter") else ("fp32", "bf16")
        assert results[kind] == [[], [], [f"{kind} in {dtype}" for dtype in dtypes]], kind
    assert results["none@sequences"] == [""] * 3
    refusal = "all-to-all returns wrong values on cpu, and sequence parallelism depends on it"
    assert results["all-to-all@sequences"] == [refusal] * 3
    assert results["all-to-all@ends"] == [[], [], ["all-to-all in fp32", "all-to-all in bf16"]]
