"""Limits on CPU time in tests depend on the speed of the machine."""

from __future__ import annotations

import ast

from places import ROOT

CLOCKS = {"process_time", "cpu_seconds", "ru_utime"}


def unscaled_bounds(source: str) -> list[str]:
    """Return the assertions of tests that measure CPU time, if their upper bound is a number."""
    tests = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
             if node.name.startswith("test_")
             if CLOCKS & {getattr(name, "attr", getattr(name, "id", None)) for name in ast.walk(node)}]
    comparisons = [comparison for test in tests for check in ast.walk(test) if isinstance(check, ast.Assert)
                   for comparison in ast.walk(check.test) if isinstance(comparison, ast.Compare)]
    return [ast.unparse(comparison) for comparison in comparisons
            if isinstance(comparison.ops[-1], ast.Lt | ast.LtE)
            if isinstance(comparison.comparators[-1], ast.Constant)
            if not {"len", "max", "ru_maxrss"} & {getattr(name, "attr", getattr(name, "id", None))
                                                  for name in ast.walk(comparison.left)}]


def test_limits_on_cpu_time_are_scaled_or_ratios() -> None:
    example = "def test_a():\n    began = cpu_seconds()\n    assert cpu_seconds() - began < {}\n"
    assert unscaled_bounds(example.format("1.2")) == ["cpu_seconds() - began < 1.2"]
    assert unscaled_bounds(example.format("scaled(1.2)")) == []
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(files) > 100
    assert {file.name: bounds for file in files if (bounds := unscaled_bounds(file.read_text()))} == {}
