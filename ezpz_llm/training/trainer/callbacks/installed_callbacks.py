"""Callbacks of installed packages, from the entry points "ezpz_llm.callbacks"."""

from __future__ import annotations

from ezpz_llm.core.base import Plugin, UserError, load_plugins
from ezpz_llm.training.trainer.callbacks.callback import Callback
from ezpz_llm.training.trainer.callbacks.callback_checks import register

GROUP = "ezpz_llm.callbacks"


def installed_callbacks() -> list[Callback]:
    """Return an instance of each callback that an installed package declares, sorted by name.

    An unusable entry point is skipped with a warning.
    """
    created: dict[str, Callback] = {}

    def find_problem(plugin: Plugin) -> str | None:
        """Create the callback, or return the reason why it cannot be used."""
        if not (isinstance(plugin.value, type) and issubclass(plugin.value, Callback)):
            return "it is not a subclass of ezpz_llm.Callback"
        callback = plugin.value()
        callback.name, callback.package = callback.name or plugin.name, plugin.package
        try:
            name = register(callback).name
        except UserError as error:
            return error.found
        if created.setdefault(name, callback) is not callback:
            return f"a callback named {name} already exists"
        return None

    load_plugins(GROUP, find_problem)
    return [created[name] for name in sorted(created)]
