"""Start coverage in each process of benchmarks/certify_coverage.py, with a context for the ranks that run the code.

Python imports this module at startup if its folder is on PYTHONPATH. Coverage starts with the first import of a
measured package, so that other processes of a launch stay fast. Contexts:

    case WORLD LAYOUT MODEL DTYPE   `certify_case`, in each of its ranks
    ranks WORLD                     other code of a process group with several ranks
    threads                         ranks that are threads of a test
    one process                     the steps that certify compares with their definition
    alone                           all other code

References of cases are not measured, because they would take minutes longer.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NoReturn

DATA_VARIABLE, INCLUDE_VARIABLE = "CERTIFY_COVERAGE_DATA", "CERTIFY_COVERAGE_INCLUDE"
"""Path of the data files before their suffix, and patterns of the measured files, separated by ":"."""
ALONE = "alone"


class Measurement:
    """Coverage of this process, and its context."""

    def __init__(self) -> None:
        self._coverage: Any = None
        self._context = ALONE

    def start(self) -> None:
        """Start coverage, unless it is running."""
        if self._coverage is not None:
            return
        import coverage

        self._coverage = coverage.Coverage(
            data_file=os.environ[DATA_VARIABLE], data_suffix=True, config_file=False, messages=False,
            include=os.environ[INCLUDE_VARIABLE].split(":"))
        self._coverage.start()
        self._coverage.switch_context(self._context)

    def restart(self) -> None:
        """Discard the data of the parent process, after a fork."""
        if self._coverage is not None:
            self._coverage.stop()
            self._coverage = None
            self.start()

    def save(self) -> None:
        """Write the data so far. A rank that dies now would otherwise lose them."""
        with suppress(Exception):  # a measured program must not fail here
            if self._coverage is not None:
                self._coverage.save()

    def set_context(self, context: str) -> None:
        """Set the context from now on."""
        self._context = context
        if self._coverage is not None:
            self._coverage.switch_context(context)

    @contextmanager
    def within(self, context: str) -> Iterator[None]:
        """Set the context for a `with` block."""
        before = self._context
        self.set_context(context)
        try:
            yield
        finally:
            self.set_context(before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop coverage for a `with` block."""
        if self._coverage is None:
            yield
            return
        self._coverage.stop()
        try:
            yield
        finally:
            self._coverage.start()
            self._coverage.switch_context(self._context)


MEASUREMENT = Measurement()


def _within(context: Callable[..., str]) -> Callable[[Any], Any]:
    """Return a decorator that sets the context during a call, and saves the data after it."""
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            with MEASUREMENT.within(context(*args)):
                result = function(*args, **named)
            MEASUREMENT.save()
            return result
        return call
    return decorate


def _unmeasured(function: Any) -> Any:
    """Decorate a function that is not measured."""
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with MEASUREMENT.paused():
            return function(*args, **named)
    return call


def _after(context: Callable[[], str]) -> Callable[[Any], Any]:
    """Return a decorator that sets the context after a call."""
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            result = function(*args, **named)
            MEASUREMENT.set_context(context())
            return result
        return call
    return decorate


def _ranks() -> str:
    size = sys.modules["torch.distributed.distributed_c10d"].get_world_size()
    return f"ranks {size}" if size > 1 else ALONE


_PATCHES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "ezpz_llm.verify.certify.case": {
        "certify_case": _within(lambda case, *_: f"case {case.world} {case.layout} {case.model} {case.dtype}")},
    "ezpz_llm.verify.certify.reference": {"make_reference": _unmeasured},
    "ezpz_llm.verify.certify.uncovered_paths": {"check_paths": _within(lambda *_: "one process")},
    "thread_ranks": {"run_ranks": _within(lambda *_: "threads")},
    "torch.distributed.distributed_c10d": {
        "init_process_group": _after(_ranks), "destroy_process_group": _after(lambda: ALONE)},
}
"""Decorators by module and function. They apply before another module can import the function."""
_STARTS = tuple(f"ezpz_llm.training.{package}"
                for package in ("engine", "model", "dist", "checkpoint", "data", "evaluate", "layout"))


class _Finder(importlib.abc.MetaPathFinder):
    """Start coverage before the first measured import, and patch modules after their import."""

    def find_spec(self, name: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name in _STARTS:
            MEASUREMENT.start()
        if name not in _PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                for function, decorate in _PATCHES[name].items():
                    setattr(module, function, decorate(getattr(module, function)))

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec


def _save_and_exit(exit_now: Callable[[int], NoReturn], code: int) -> NoReturn:
    MEASUREMENT.save()
    exit_now(code)


if DATA_VARIABLE in os.environ:
    sys.meta_path.insert(0, _Finder())
    atexit.register(MEASUREMENT.save)
    os._exit = functools.partial(_save_and_exit, os._exit)
    os.register_at_fork(after_in_child=MEASUREMENT.restart)
