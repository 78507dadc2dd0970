"""Kinds of hostile input: studies, certificates, callbacks, and plug-ins of other users and packages."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import hostile_mutations as mutate
from hostile_kinds import LAUNCH, kind, written
from hostile_plugins import GROUPS, MODULES

_SIZES = (1, 2, 4)
_SPLIT = {"compute": 0.05, "exposed_communication": 0.02, "data": 0.01, "optimizer": 0.01, "other": 0.01}
_POINTS = [{"name": f"{mode}-ddp-n{size}", "mode": mode, "ds_config": "ddp", "nodes": size, "ranks": size,
            "global_batch": 4 * size, "micro_batch": 4, "accumulation": 1, "launch": ["-n", str(size)],
            "command": ["python3", "-m", "ezpz_llm.train", "--steps", "60"]}
           for mode in ("weak", "strong") for size in _SIZES]
_STUDY = {"version": 1, "unit": "nodes", "repeats": 2, "seed": 1, "typed": ["ezpz-llm", "scale"], "directory": "/",
          "hosts": None, "threads": 1, "points": _POINTS, "notes": ["a note"]}
_REPEATS = [{"point": point["name"], **{name: point[name] for name in (
    "mode", "ds_config", "nodes", "ranks", "global_batch", "micro_batch", "accumulation")}, "repeat": repeat,
    "run_dir": f"points/{point['name']}/run-{repeat}", "block_size": 32,
    "step_times_s": [0.1 + 0.001 * step for step in range(20)], "tokens_per_second": 1280.0, "mfu": 0.3,
    "peak_device_bytes": None, "peak_host_bytes": 2**30, "split": _SPLIT, "slowest_rank": 0, "slowest_host": "n1",
    "first_loss": 5.0, "last_loss": 4.0, "error": None} for point in _POINTS for repeat in range(2)]
_RUN = {"launch": LAUNCH, "exit": {"code": 0, "cause": "", "ended": 2000.0}, "precision": "fp32",
        "environment": {"versions": {"torch": "2.6"}, "hosts": ["n1"], "device": {"type": "cpu"}}}


def _study(rng: Random, folder: Path) -> Path:
    """Create a study in which one or two files are hostile."""
    files: dict[str, Any] = {"study.json": _STUDY, "points.jsonl": _REPEATS,
                             "points/weak-ddp-n1/run-0/run.json": _RUN}
    hostile = set(rng.sample(sorted(files), rng.choice([1, 1, 2])))
    for name, whole in files.items():
        if name.endswith("l"):
            content = mutate.lines(rng, whole) if name in hostile else b"".join(
                json.dumps(line).encode() + b"\n" for line in whole)
        else:
            content = mutate.json_data(rng, whole) if name in hostile else json.dumps(whole).encode()
        written(folder, name, content)
    return folder


@kind
def study(rng: Random, folder: Path) -> object:
    """Report, compare, and continue another user's study. Its commands must not run."""
    from ezpz_llm.core.base import UserError
    from ezpz_llm.core.rundir import RunDir
    from ezpz_llm.verify.scaling.command import main
    from ezpz_llm.verify.scaling.findings import find
    from ezpz_llm.verify.scaling.page import findings_page
    from ezpz_llm.verify.scaling.study import read_study, run_dir_of
    from ezpz_llm.verify.scaling.study_report import compare_main, findings_text

    place = str(_study(rng, folder / "study"))
    way = rng.randrange(6)
    if way == 0:
        return main(["--study", place, "--dry-run"])
    if way == 1:
        (folder / "study").chmod(0o777)
        with contextlib.suppress(UserError):
            main(["--study", place])
            raise AssertionError("the commands of a study that others can write were run")
        return None
    if way == 2:
        definition = read_study(Path(place))
        for point, repeat in definition.order()[:100]:
            assert (folder / "study/points") in run_dir_of(Path(place), point, repeat).path.resolve().parents
        return definition
    if way == 3:
        _study(rng, folder / "other")
        return compare_main([place, str(folder / "other"), *rng.choice([[], ["--json"]])])
    findings = find(Path(place), rng.choice([(), (), (8,), (10**400,)]))
    assert all((folder / "study") in RunDir(folder / "study" / repeat.run_dir).path.resolve().parents
               for point in findings.points for repeat in point.repeats)
    if way == 4 and rng.random() < 0.1:
        return findings_page(findings)
    return findings_text(findings, 100, color=rng.random() < 0.5)


_CERTIFICATE = {
    "command": "ezpz-llm certify --layouts ddp,zero1 --world 2 --steps 4 --model tiny-gpt2", "date": "2026-01-02",
    "seconds": 2.0, "passed": True, "refused": None, "environment": {"versions": {"torch": "2.6"}},
    "results": [{"layout": "ddp", "model": "tiny-gpt2", "dtype": "fp32", "world": 2, "fault": None, "passed": True,
                 "failures": [], "kinds": [], "worst": {}, "losses": [5.0, 4.0], "seconds": 1.0}]}


@kind
def certificate(rng: Random, folder: Path) -> object:
    """Read a certificate, plan its command, and compare it with a new one."""
    from ezpz_llm.core.base import read_json
    from ezpz_llm.core.base.records import as_record
    from ezpz_llm.verify.certify.cases import parser, plan
    from ezpz_llm.verify.certify.recheck import compare, read_certificate
    from ezpz_llm.verify.certify.records import CertificateRecord

    whole = {**_CERTIFICATE}
    if rng.random() < 0.5:
        worlds = ",".join(map(str, range(1, rng.choice([3, 30, 3000]))))
        option = rng.choice(["--layouts " + "a," * 100_000, f"--steps {10 ** rng.choice([1, 6, 12, 400])}",
                             f"--world {worlds}", f"--target {folder}/mine.py:f", "--run-dir /x"])
        command = f"{whole['command']} {option}"
        if rng.random() < 0.3:
            command = mutate.text(rng, command)
        content = json.dumps({**whole, "command": command}).encode()
    else:
        content = mutate.json_data(rng, whole)
    path = written(folder, "certify.json", content)
    original = read_certificate(path)
    other = as_record(CertificateRecord, read_json(path), str(path))
    return plan(parser().parse_args(original.arguments)), compare(original, other)


class _Odd(BaseException):
    def __str__(self) -> str:
        raise SystemExit(0)


def _raise(error: BaseException) -> Any:
    raise error


_ACTIONS: list[Callable[..., Any]] = [
    *[lambda *_: None] * 8,
    lambda *_: _raise(SystemExit(0)),
    lambda *_: _raise(_Odd()),
    lambda *_: _raise(ValueError("a\nb\x1b]0;c\x07")),
    lambda context, *_: setattr(context, "step", 10**400),
    lambda context, *_: setattr(context, "dist", None),
    lambda context, *_: context.metrics.clear(),
    lambda context, *_: context.print("\x1b]0;x\x07" * 3),
]
_VALUES = [*mutate.VALUES, *mutate.WORDS[:12], math, object(), 1j, b"x", int, range(3)]
_ARGUMENTS = {"on_step_begin": 1, "on_step_end": 1, "on_log": 2, "on_evaluate": 1, "on_save": 2, "on_train_end": 1,
              "state_dict": 0, "load_state_dict": 1}
"""Hooks of a callback, and their numbers of arguments."""


@kind
def callback(rng: Random, folder: Path) -> object:
    """Register a callback of another package, and call its hooks."""
    from ezpz_llm import Callback
    from ezpz_llm.training.dist.optional_work import OptionalWork
    from ezpz_llm.training.trainer.callbacks.callback import CallbackContext
    from ezpz_llm.training.trainer.callbacks.callback_runner import Callbacks

    def act(*arguments: Any) -> Any:
        """Misbehave in one of many ways; `arguments` begin with the callback."""
        action = rng.choice(_ACTIONS)
        if rng.random() < 0.3 and len(arguments) > 1 and hasattr(arguments[1], "log"):
            return arguments[1].log(rng.choice(["mine", *mutate.WORDS]), rng.choice(_VALUES))
        if len(arguments) > 2 and rng.random() < 0.3 and not isinstance(arguments[2], Path):
            rng.choice(arguments[2])[rng.choice(["loss", "mine", 3])] = rng.choice(_VALUES)
            return None
        return action(*arguments[1:]) if len(arguments) > 1 else rng.choice(_VALUES)

    members: dict[str, Any] = {}
    for name in rng.sample(["name", "package", "evaluate_every", "logs_evaluation"], rng.choice([0, 0, 0, 1])):
        members[name] = rng.choice([*_VALUES, property(lambda self: _raise(SystemExit(0)))])
    for hook in rng.sample(sorted(_ARGUMENTS), rng.choice([1, 2, 4])):
        by_number = [lambda self: act(self), lambda self, a: act(self, a), lambda self, a, b: act(self, a, b)]
        members[hook] = (by_number[_ARGUMENTS[hook]] if rng.random() < 0.95 else
                         rng.choice([*by_number, act, *rng.sample(_VALUES, 3)]))
    made = type("Mine", (Callback,), {**members, "__module__": rng.choice(["mine", "__main__"])})
    lines = [{"step": step, "loss": 4.0, "lr": 0.1} for step in (2, 3)]
    metrics = SimpleNamespace(latest=lines[-1], record_task=lambda step, **figures: json.dumps(
        {name: float(value) for name, value in figures.items() if value is not None}), erase_live_line=lambda: None)
    dist = SimpleNamespace(rank=0, world_size=1, is_main=True, optional=OptionalWork())
    context = CallbackContext(dist, None, 3, 10, SimpleNamespace(consumed_tokens=8), metrics)
    callbacks = Callbacks([made() if rng.random() < 0.95 else rng.choice([made, None])], context)
    callbacks.step_begin()
    callbacks.step_end()
    callbacks.log(lines)
    assert [line["step"] for line in lines] == [2, 3]
    json.dumps(lines)
    for due in callbacks.due(3, is_last=True, validates=True):
        callbacks.evaluate(due)
    callbacks.save(folder)
    states = json.loads(json.dumps(callbacks.states()))
    callbacks.restore({"Mine": mutate.value(rng, {"a": 1}), **states})
    callbacks.train_end()
    assert context.step == 3
    return states


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("wrong_plugin", None)


@kind
def plugin(rng: Random, folder: Path) -> object:
    """Load the entry points of a damaged package, or an invalid plug-in."""
    from ezpz_llm.launcher.jobs.schedulers import schedulers
    from ezpz_llm.launcher.planning.dialects import dialects
    from ezpz_llm.training.layout.optimizers import _all_optimizers
    from ezpz_llm.training.trainer.callbacks.installed_callbacks import installed_callbacks

    group = rng.choice(GROUPS)
    metadata = "Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n"
    points = f"[{group}]\nwrong = wrong_plugin:PLUGIN\n"
    way = rng.randrange(4)
    info = "wrong-1.0.dist-info"
    written(folder, f"{info}/METADATA", mutate.data(rng, metadata) if way == 0 else metadata.encode())
    written(folder, f"{info}/entry_points.txt", mutate.data(rng, points) if way == 1 else points.encode())
    module = MODULES[rng.choice(sorted(MODULES))]
    written(folder, "wrong_plugin.py", mutate.data(rng, module) if way == 2 else module.encode())
    with _on_path(folder):
        return installed_callbacks(), list(dialects()), schedulers(), _all_optimizers()
