"""Calls of a run's callbacks, errors that name the callback, and the callbacks' state in checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ezpz_llm.core.base import UserError, error_text, parse_json, print_lines
from ezpz_llm.core.base.label_rows import align_rows
from ezpz_llm.training.dist.agreement import broadcast, raise_together, run_together
from ezpz_llm.training.observe import terminal_width
from ezpz_llm.training.trainer.callbacks.callback import Callback, CallbackContext
from ezpz_llm.training.trainer.callbacks.callback_checks import Registered, register
from ezpz_llm.training.trainer.callbacks.metric_values import GuardedLines

_OWN_NAMES = ("guard",)
"""Names of the trainer's callbacks that have a state."""

_FAILURE = "callbacks/failure"
"""Key of the ranks' store with the first error of a callback, as JSON: problem and location."""

Kind = TypeVar("Kind", bound=Callback)


class Callbacks:
    """Callbacks of a run, in the order in which each hook calls them. All methods are collective.

    An error of an added callback becomes a UserError that names the callback and its package. It ends all ranks
    together, except in the hooks of every step, where the ranks do not communicate: there it ends its own rank at
    once, and the others when they lose their connection to that rank, with the same message.

    Raises:
        UserError: a callback is invalid, two have the same name, or the ranks have different callbacks. The same on
            every rank.
    """

    def __init__(self, callbacks: Iterable[Callback], context: CallbackContext) -> None:
        self.context = context
        self._callbacks = run_together(context.dist, lambda: list(map(register, callbacks)))
        self._unclaimed: dict[str, Any] = {}
        self.added = [callback for callback in self._callbacks if callback.is_added]
        main_added = broadcast(context.dist, [_signature(callback) for callback in self.added])
        run_together(context.dist, lambda: _check_added(self.added, main_added, context.dist.rank))
        self._begin, self._end, self._log, self._evaluate, self._save, self._train_end, self._with_state = (
            [callback for callback in self._callbacks if hook in callback.hooks]
            for hook in ("on_step_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end",
                         "state_dict"))

    def describe_added(self) -> None:
        """Print the added callbacks, and record them in run.json."""
        if not self.added:
            return
        dist = self.context.dist
        packages = {callback.name: _package_of(callback) for callback in self.added}
        text = ", ".join(f"{name} ({package})" for name, package in packages.items())
        self.context.print(align_rows([("callbacks", text)], terminal_width()).removesuffix("\n"))
        if dist.is_main:
            dist.side.update_record(dist.run_dir, callbacks=packages)

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        """Return the callbacks of a class."""
        return [registered.callback for registered in self._callbacks if isinstance(registered.callback, kind)]

    def step_begin(self) -> None:
        """Call `on_step_begin`."""
        for callback in self._begin:
            self._call_alone(callback, "on_step_begin")

    def step_end(self) -> None:
        """Call `on_step_end`."""
        for callback in self._end:
            self._call_alone(callback, "on_step_end")

    def log(self, lines: Sequence[dict[str, Any]]) -> None:
        """Call `on_log`, and hold the messages that it prints."""
        with self.context.held_messages():
            for callback in self._log:
                self._call(callback, "on_log", partial(_log, callback, self.context, tuple(lines)))

    def due(self, step: int, is_last: bool, validates: bool) -> list[Registered]:
        """Return the callbacks that evaluate after a step."""
        return [callback for callback in self._evaluate
                if is_last or (validates if callback.evaluate_every is None
                               else is_due(step, callback.evaluate_every))]

    def evaluate(self, callback: Registered) -> None:
        """Call `on_evaluate`."""
        self._call(callback, "on_evaluate", partial(callback.callback.on_evaluate, self.context))

    def save(self, folder: Path) -> None:
        """Call `on_save`."""
        for callback in self._save:
            self._call(callback, "on_save", partial(callback.callback.on_save, self.context, folder))

    def train_end(self) -> None:
        """Call `on_train_end`."""
        for callback in self._train_end:
            self._call(callback, "on_train_end", partial(callback.callback.on_train_end, self.context))

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of the callbacks, and of callbacks that are absent from this run, by name."""
        states = dict(self._unclaimed)
        for callback in self._with_state:
            if state := self._call(callback, "state_dict", partial(_json_state, callback.callback)):
                states[callback.name] = state
        return states

    def restore(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore the callbacks' states from a checkpoint; keep the states of absent callbacks."""
        states = dict(states)
        for callback in self._with_state:
            if (saved := states.pop(callback.name, None)) is not None:
                self._call(callback, "load_state_dict", partial(callback.callback.load_state_dict, saved))
        if states.keys() - self._unclaimed.keys():
            self.context.print(f"note: the checkpoint has the state of callbacks that this run does not have "
                               f"({', '.join(sorted(states))}); new checkpoints keep it")
        self._unclaimed = states

    def _call_alone(self, callback: Registered, hook: str) -> None:
        """Call a hook of every step, without communication."""
        try:
            _call_hook(partial(getattr(callback.callback, hook), self.context))
        except Exception as error:
            if not callback.is_added:
                raise
            raise self._failure(callback, hook, error) from error

    def _call(self, callback: Registered, hook: str, action: Callable[[], Any]) -> Any:
        """Call another hook; raise an added callback's error on every rank."""
        if not callback.is_added:
            return action()
        try:
            result, error = self.context.dist.optional.try_together(partial(_call_hook, action))
        except Exception as alone:  # another rank still waits in the callback
            raise self._failure(callback, hook, alone) from alone
        raise_together(self.context.dist, None if error is None else self._failure(callback, hook, error))
        return result

    def _failure(self, callback: Registered, hook: str, error: Exception) -> UserError:
        """Return the error that ends the run: the first one that a rank announced, or this rank's, with its
        traceback on stderr."""
        source = getattr(sys.modules.get(type(callback.callback).__module__), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if frame.filename == source), frames[-1])
        reason = (error.found if isinstance(error, UserError) else str(error) if isinstance(error, _CallbackExit)
                  else error_text(error))
        found = (f"the callback {callback.name} of {_package_of(callback)} failed in {hook} on rank "
                 f"{self.context.dist.rank}: {' '.join(reason.split())}")
        own = json.dumps([found, f"{frame.filename}, line {frame.lineno}"])
        first = own
        if (store := self.context.dist.optional.store) is not None:
            with contextlib.suppress(RuntimeError):  # rank 0, which has the store, may have ended
                first = store.compare_set(_FAILURE, "", own).decode()
        if first == own:
            print_lines("".join(traceback.format_tb(error.__traceback__)), end="", file=sys.stderr)
        return _announced_error(first)

    def failure_elsewhere(self) -> UserError | None:
        """Return the callback error that another rank announced before it ended, if any. Not collective."""
        if (store := self.context.dist.optional.store) is not None:
            with contextlib.suppress(RuntimeError):
                return _announced_error(store.get(_FAILURE).decode()) if store.check([_FAILURE]) else None
        return None


def is_due(step: int, every: int) -> bool:
    """Return True at multiples of `every`; never for 0."""
    return every > 0 and step % every == 0


class _CallbackExit(Exception):
    """SystemExit or another BaseException of a callback, which must not end the run as if it were complete."""


def _call_hook(action: Callable[[], Any]) -> Any:
    """Call a hook. Its exceptions are derived from Exception, except for Ctrl-C."""
    try:
        return action()
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _CallbackExit(error_text(error)).with_traceback(error.__traceback__) from None


def _log(callback: Registered, context: CallbackContext, lines: Sequence[dict[str, Any]]) -> None:
    guarded = GuardedLines(lines) if callback.is_added else None
    callback.callback.on_log(context, lines)
    if guarded is not None:
        guarded.check()


def _package_of(callback: Registered) -> str:
    """Return the package of a callback, or the script that defines it."""
    module = type(callback.callback).__module__
    return callback.package or (Path(sys.argv[0]).name if module == "__main__" else module.partition(".")[0])


def _signature(callback: Registered) -> tuple[Any, ...]:
    """Return what must be equal on all ranks, so that they call the same methods in the same order."""
    return callback.name, callback.evaluate_every, callback.logs_evaluation, callback.hooks


def _check_added(added: Sequence[Registered], main_added: Sequence[tuple[Any, ...]], rank: int) -> None:
    names, main_names = [callback.name for callback in added], [signature[0] for signature in main_added]
    if names != main_names:
        raise UserError(f"the ranks have different callbacks: rank {rank} has {', '.join(names) or 'none'}, rank 0 "
                        f"has {', '.join(main_names) or 'none'}", where="callbacks",
                        instead="install the same packages on every node")
    for callback, of_main in zip(added, main_added, strict=True):
        if _signature(callback) != of_main:
            raise UserError(f"the callback {callback.name} has other methods or another evaluate_every on rank "
                            f"{rank} than on rank 0", where="callbacks",
                            instead="the same attributes and methods on every rank")
    taken = [*names, *_OWN_NAMES]
    if duplicate := next((name for name in names if taken.count(name) > 1), None):
        raise UserError(f"two callbacks are named {duplicate}", where="callbacks",
                        instead="uninstall one of their packages, or give each a `name`")


def _announced_error(text: str) -> UserError:
    found, where = parse_json(text, "callbacks")
    return UserError(found, where=where, instead="fix the callback, or run without it", exit_code=1)


def _json_state(callback: Callback) -> dict[str, Any]:
    """Return a callback's state.

    Raises:
        TypeError: it does not consist of JSON values.
    """
    state = callback.state_dict()
    if not isinstance(state, dict) or not _is_json(state):
        raise TypeError(f"the state must be a dict of JSON values, not {state!r}"[:500])
    return state


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(member) for key, member in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return math.isfinite(value) if isinstance(value, float) else value is None or isinstance(value, (str, int))
