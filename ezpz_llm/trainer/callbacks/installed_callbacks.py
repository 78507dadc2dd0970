"""Callbacks of installed packages, from the entry points "ezpz_llm.callbacks"."""

from __future__ import annotations

from typing import Any

from ezpz_llm.base import load_plugins
from ezpz_llm.trainer.callbacks.callback import Callback

GROUP = "ezpz_llm.callbacks"


def installed_callbacks() -> list[Callback]:
    """Return an instance of each callback that an installed package declares, sorted by name.

    An unusable entry point is skipped with a warning.
    """
    created: dict[type[Callback], Callback] = {}

    def find_problem(plugin: Any) -> str | None:
        if not (isinstance(plugin, type) and issubclass(plugin, Callback)):
            return "it is not a subclass of ezpz_llm.Callback"
        created[plugin] = plugin()
        return None

    callbacks = []
    for plugin in load_plugins(GROUP, find_problem):
        callback = created[plugin.value]
        callback.name, callback.package = callback.name or plugin.name, plugin.package
        callbacks.append(callback)
    return sorted(callbacks, key=lambda callback: callback.name)
