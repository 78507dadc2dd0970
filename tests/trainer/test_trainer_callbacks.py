"""Callbacks that are passed to the trainer, in one process."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_runs import clean_env
from places import ROOT
from slowness import scaled

from ezpz_llm import Callback
from ezpz_llm.core.base.errors import UserError
from ezpz_llm.core.rundir import RunDir, read_lines
from ezpz_llm.training.trainer.callbacks.callback_checks import register
from ezpz_llm.training.trainer.options import parse
from ezpz_llm.training.trainer.run import run

SMALL = ["--n-layer", "1", "--n-head", "2", "--n-kv-head", "2", "--n-embd", "32", "--block-size", "32",
         "--eval-tokens", "64", "--sample-tokens", "0", "--profile", "false", "--precision", "fp32", "--device",
         "cpu", "--micro-batch-size", "2", "--ds-config", "ddp", "--save-async", "false", "--steps", "6"]


def train(folder: Path, callbacks: list[Callback], *options: str) -> list[dict[str, Any]]:
    assert run(parse([*SMALL, *options, "--run-dir", str(folder)]), callbacks) == 0
    return list(read_lines(RunDir(folder).metrics))


def state_of(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"checkpoints/step-{step:08d}/state.json").read_text())


class Calls(Callback):
    """Callback that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_step_begin(self, context: Any) -> None:
        self.calls.append(("begin", context.step))

    def on_step_end(self, context: Any) -> None:
        self.calls.append(("end", context.step))
        assert context.tokens == context.step * 64

    def on_log(self, context: Any, lines: Any) -> None:
        self.calls.append(("log", len(lines)))
        assert context.metrics == lines[-1]

    def on_evaluate(self, context: Any) -> None:
        self.calls.append(("evaluate", context.step))

    def on_save(self, context: Any, folder: Path) -> None:
        self.calls.append((folder.name, context.step))

    def on_train_end(self, context: Any) -> None:
        self.calls.append(("train_end", context.step))


class Rarely(Calls):
    evaluate_every = 4


def test_order_of_calls(tmp_path: Path) -> None:
    often, rarely = Calls(), Rarely()
    train(tmp_path / "run", [often, rarely], "--log-every", "2", "--eval-every", "3", "--save-every", "3")

    def steps(*calls: tuple[int, list[tuple[str, int]]]) -> list[tuple[str, int]]:
        return [call for step, later in calls for call in (("begin", step - 1), ("end", step), *later)]

    assert often.calls == [*steps((1, [("log", 1)]), (2, [("log", 1)]),
                                  (3, [("log", 1), ("step-00000003", 3), ("evaluate", 3)]), (4, [("log", 1)]),
                                  (5, []), (6, [("log", 2), ("step-00000006", 6), ("evaluate", 6)])),
                           ("train_end", 6)]
    assert [step for call, step in rarely.calls if call == "evaluate"] == [4, 6]


class Values(Callback):
    def on_step_end(self, context: Any) -> None:
        context.log("a_tensor", torch.tensor(0.5 * context.step))
        context.log("not_finite", torch.tensor(math.nan) if context.step == 1 else math.inf)
        value = torch.ones(())
        context.log("changed_later", value)
        value.zero_()

    def on_log(self, context: Any, lines: Any) -> None:
        for line in lines:
            line["infinite"] = math.inf
        context.log("last", torch.tensor(-math.inf))


def test_values_of_metrics(tmp_path: Path) -> None:
    lines = train(tmp_path / "run", [Values()])
    assert [line["a_tensor"] for line in lines] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert all(line["not_finite"] is None and line["changed_later"] == 1.0 for line in lines)
    assert all(line["infinite"] is None for line in lines)
    assert [line["step"] for line in lines if "last" in line] == [1, 6]


class State(Callback):
    name = "state"

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_state_is_restored_and_that_of_an_absent_callback_is_kept(tmp_path: Path,
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "first", [State([1, {"a": None}])], "--save-every", "2", "--keep-last", "9")
    assert state_of(tmp_path / "first", 2)["callbacks"] == {"state": {"value": [1, {"a": None}]}}
    resume = ["--resume", str(tmp_path / "first/checkpoints/step-00000002"), "--save-every", "2"]
    capsys.readouterr()
    train(tmp_path / "absent", [], *resume)
    assert "that this run does not have (state); new checkpoints keep it" in capsys.readouterr().out
    assert state_of(tmp_path / "absent", 6)["callbacks"] == {"state": {"value": [1, {"a": None}]}}
    restored = State()
    train(tmp_path / "again", [restored], "--resume", str(tmp_path / "absent/checkpoints/step-00000004"))
    assert restored.value == [1, {"a": None}]
    assert "does not have" not in capsys.readouterr().out


def test_checkpoint_without_callbacks_loads(tmp_path: Path) -> None:
    train(tmp_path / "first", [], "--save-every", "2", "--keep-last", "9")
    assert "callbacks" not in state_of(tmp_path / "first", 2)
    unchanged = State(7)
    train(tmp_path / "again", [unchanged], "--resume", str(tmp_path / "first/checkpoints/step-00000002"))
    assert unchanged.value == 7


@pytest.mark.parametrize("value", [torch.ones(1), math.nan, {1: 2}, {2}])
def test_state_must_be_json(tmp_path: Path, value: Any) -> None:
    reason = "failed in state_dict on rank 0: TypeError: the state must be a dict of JSON values"
    with pytest.raises(UserError, match=f"the callback state of test_trainer_callbacks {reason}"):
        train(tmp_path / "run", [State(value)])


class Guard(State):
    name = "guard"


@pytest.mark.parametrize("callbacks", [[State(), State()], [Guard()]])
def test_names_must_differ(tmp_path: Path, callbacks: list[Callback]) -> None:
    with pytest.raises(UserError, match=f"two callbacks are named {callbacks[0].name}"):
        train(tmp_path / "run", callbacks)


class Reserved(Callback):
    def on_step_end(self, context: Any) -> None:
        context.log("loss", 0.0)


class Early(Callback):
    def on_step_begin(self, context: Any) -> None:
        context.log("early", 0.0)


class Wide(Callback):
    def on_step_end(self, context: Any) -> None:
        context.log("wide", torch.ones(2))


@pytest.mark.parametrize(("callback", "reason"), [
    (Reserved(), "loss is a metric of the trainer"), (Early(), "step 0 has no line"),
    (Wide(), "wide has 2 elements")])
def test_invalid_metric_ends_the_run(tmp_path: Path, callback: Callback, reason: str) -> None:
    with pytest.raises(UserError, match=f"the callback {type(callback).__name__} .* failed in on_step_.*{reason}"):
        train(tmp_path / "run", [callback])


class Misbehaved(Callback):
    """Callback that does something to the context in a hook."""

    def __init__(self, hook: str, action: Any) -> None:
        self._hook, self._action = hook, action

    def on_step_end(self, context: Any) -> None:
        if self._hook == "on_step_end":
            self._action(context)

    def on_log(self, context: Any, lines: Any) -> None:
        if self._hook == "on_log":
            self._action(context, lines)

    def on_evaluate(self, context: Any) -> None:
        if self._hook == "on_evaluate":
            self._action(context)

    def state_dict(self) -> dict[str, Any]:
        if self._hook == "state_dict":
            self._action()
        return {}


def _exit(*_: Any) -> None:
    raise SystemExit(0)


def _raise_odd(*_: Any) -> None:
    raise type("Odd", (BaseException,), {"__str__": _exit})


@pytest.mark.parametrize(("hook", "action", "reason"), [
    ("on_step_end", _exit, "SystemExit: 0"),
    ("on_evaluate", _exit, "SystemExit: 0"),
    ("state_dict", _exit, "SystemExit: 0"),
    ("on_step_end", _raise_odd, "Odd"),
    ("on_step_end", lambda context: context.log("big", 10**400), "big has more than 64 bits"),
    ("on_step_end", lambda context: context.log("part", Fraction(10**400)), "OverflowError"),
    ("on_step_end", lambda context: context.log("a\nb", 1), "the metric's name is 'a\\\\nb'"),
    ("on_step_end", lambda context: context.log("text", "x"), "text is 'x', but must be a number or a tensor"),
    ("on_step_end", lambda context: context.log("c", torch.ones((), dtype=torch.complex64)), "c is a complex or a"),
    ("on_step_end", lambda context: setattr(context, "step", 5), "AttributeError"),
    ("on_step_end", lambda context: setattr(context, "total_steps", 5), "context.total_steps is read-only"),
    ("on_log", lambda context, lines: lines[-1].update(step=99), "step is a metric of the trainer"),
    ("on_log", lambda context, lines: lines[-1].pop("loss"), "loss is a metric of the trainer"),
    ("on_log", lambda context, lines: lines[-1].update(text="x"), "text is 'x', but must be a number"),
    ("on_log", lambda context, lines: lines.clear(), "AttributeError"),
    ("on_log", lambda context, lines: context.metrics.clear(), "AttributeError")])
def test_misbehaved_callback_is_named_and_fails_the_run(tmp_path: Path, hook: str, action: Any,
                                                        reason: str) -> None:
    found = f"the callback Misbehaved of .* failed in {hook} on rank 0: .*{reason}"
    with pytest.raises(UserError, match=found) as error:
        train(tmp_path / "run", [Misbehaved(hook, action)])
    assert error.value.exit_code == 1


def _with(**members: Any) -> Callback:
    return type("Bad", (Callback,), members)()


async def _coroutine(self: Any, context: Any) -> None:
    pass


@pytest.mark.parametrize(("callback", "problem"), [
    (_with(name="a\nb"), "its name is 'a\\nb'"),
    (_with(name=3), "its name is 3"),
    (_with(name=property(_exit)), "SystemExit: 0"),
    (_with(package=["x"]), "its package is a list"),
    (_with(evaluate_every="x"), "its evaluate_every is 'x'"),
    (_with(evaluate_every=-1), "its evaluate_every is -1"),
    (_with(evaluate_every=2.0), "its evaluate_every is 2.0"),
    (_with(logs_evaluation=None), "its logs_evaluation is None"),
    (_with(on_log=lambda self, context: None), "its on_log cannot be called as on_log(context, lines)"),
    (_with(on_save=lambda self, context, folder, other: None), "its on_save cannot be called"),
    (_with(on_step_end=None), "its on_step_end is None"),
    (_with(on_epoch_end=lambda self, context: None), "its on_epoch_end would never be called; the hooks are"),
    (_with(on_step_end=_coroutine), "its on_step_end is a coroutine"),
    (Calls, "it is a class, not an instance"),
    (print, "it is not an instance of a subclass of ezpz_llm.Callback")])
def test_invalid_callback_is_rejected_before_the_run(tmp_path: Path, callback: Any, problem: str) -> None:
    with pytest.raises(UserError) as error:
        train(tmp_path / "run", [callback])
    assert problem in error.value.found
    assert error.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_a_hook_on_the_instance_is_called() -> None:
    callback = _with()
    assert not register(callback).hooks
    callback.on_step_end = lambda context: None  # type: ignore[method-assign]
    assert register(callback).hooks == ("on_step_end",)


def test_later_change_of_evaluate_every_has_no_effect(tmp_path: Path) -> None:
    rarely = Rarely()
    action = Misbehaved("on_step_end", lambda context: setattr(rarely, "evaluate_every", "x"))
    train(tmp_path / "run", [rarely, action])
    assert [step for call, step in rarely.calls if call == "evaluate"] == [4, 6]


def test_example_of_the_docs(tmp_path: Path) -> None:
    section = (ROOT / "docs/use/library.md").read_text().split("## Callbacks of the trainer")[1]
    example = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert example
    (tmp_path / "mine.py").write_text(example[1])
    words = ["--steps", "6", "--eval-every", "3", *SMALL[:-2], "--run-dir", "run"]
    done = subprocess.run([sys.executable, "mine.py", *words], cwd=tmp_path, env=clean_env(OMP_NUM_THREADS="1"),
                          text=True, capture_output=True, timeout=scaled(200), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(mine.py)" in done.stdout
    lines = list(read_lines(RunDir(tmp_path / "run").metrics))
    assert [line["step"] for line in lines if line.get("copy_loss", 0) > 1] == [3, 6]
    rejected = subprocess.run([sys.executable, "mine.py", "--model", "none"], cwd=tmp_path, text=True,
                              env=clean_env(OMP_NUM_THREADS="1"), capture_output=True, timeout=scaled(100),
                              check=False)
    assert rejected.returncode == 2
    assert rejected.stderr.startswith("error: ")
