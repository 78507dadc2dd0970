"""Checks of callbacks when they are registered (imports no torch)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ezpz_llm.core.base import UserError, error_text, is_one_line, shorten_value
from ezpz_llm.training.trainer.callbacks.callback import Callback

_MAX_NAME = 100
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "on_step_begin": ("context",), "on_step_end": ("context",), "on_log": ("context", "lines"),
    "on_evaluate": ("context",), "on_save": ("context", "folder"), "on_train_end": ("context",),
    "state_dict": (), "load_state_dict": ("state",)}
"""Arguments of each method of a callback."""


@dataclass(frozen=True)
class Registered:
    """Callback with its attributes at registration, so that a later change has no effect."""

    callback: Callback
    name: str
    package: str
    evaluate_every: int | None
    logs_evaluation: bool

    @property
    def hooks(self) -> tuple[str, ...]:
        """Methods that the callback overrides, in its class or on the instance."""
        return tuple(hook for hook in _ARGUMENTS
                     if getattr(getattr(self.callback, hook), "__func__", None) is not getattr(Callback, hook))

    @property
    def is_added(self) -> bool:
        """True for a callback of another package."""
        return not type(self.callback).__module__.startswith("ezpz_llm.")


def register(callback: Any) -> Registered:
    """Check a callback and return it with its attributes.

    Raises:
        UserError: it is not a callback, or an attribute or the signature of a method is invalid.
    """
    kind = callback if isinstance(callback, type) else type(callback)
    problem: str | None
    where = f"the callback {' '.join(kind.__name__.split())}"
    instead = "the attributes and methods of ezpz_llm.Callback"
    if not isinstance(callback, Callback):
        is_class = isinstance(callback, type) and issubclass(callback, Callback)
        problem = "a class, not an instance" if is_class else "not an instance of a subclass of ezpz_llm.Callback"
        raise UserError(f"it is {problem}", where=where, instead=f"{kind.__name__}()" if is_class else instead)
    try:
        name, package = callback.name or kind.__name__, callback.package
        every, logs = callback.evaluate_every, callback.logs_evaluation
        problem = _attribute_problem(name, package, every, logs) or _method_problem(callback)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a property of the callback
        problem = error_text(error)
    if problem is not None:
        raise UserError(problem, where=where, instead=instead)
    return Registered(callback, name, package, every, logs)


def _attribute_problem(name: Any, package: Any, every: Any, logs: Any) -> str | None:
    if not isinstance(name, str) or not is_one_line(name) or len(name) > _MAX_NAME:
        return f"its name is {shorten_value(name)}, but must be a string of one line, up to {_MAX_NAME} characters"
    if not isinstance(package, str) or not is_one_line(package):
        return f"its package is {shorten_value(package)}, but must be a string of one line"
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 0):
        return f"its evaluate_every is {shorten_value(every)}, but must be None or a whole number, 0 or more"
    if not isinstance(logs, bool):
        return f"its logs_evaluation is {shorten_value(logs)}, but must be True or False"
    return None


def _method_problem(callback: Callback) -> str | None:
    kind = type(callback)
    for name in dir(kind):
        if name.startswith("on_") and name not in _ARGUMENTS and callable(getattr(kind, name)):
            hooks = ", ".join(hook for hook in _ARGUMENTS if hook.startswith("on_"))
            return f"its {name} would never be called; the hooks are {hooks}"
    for hook, names in _ARGUMENTS.items():
        method = getattr(callback, hook)
        call = f"{hook}({', '.join(names)})"
        if not callable(method):
            return f"its {hook} is {shorten_value(method)}, but must be a method {call}"
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
            return f"its {hook} is a coroutine or a generator, but must be a plain method {call}"
        try:
            inspect.signature(method).bind(*names)
        except (TypeError, ValueError) as error:
            return f"its {hook} cannot be called as {call}: {error}"
    return None


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Check the callbacks of a script, before the run is set up.

    Raises:
        UserError: see `register`.
    """
    for callback in callbacks:
        register(callback)
