"""Which trackers `--track` names, known to be installed before a run starts (imports none of them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from ezpz_llm.errors import UserError, unknown

_NEEDS = {"tensorboard": ("tensorboard",), "wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The trackers, each also the name of its extra and of its module here, and the packages it imports."""
_ONLINE = "online"
_MLFLOW_SERVER = "MLFLOW_TRACKING_URI"


@dataclass(frozen=True)
class Choice:
    """One tracker, which writes into the run directory alone unless it is `online`."""

    name: str
    online: bool


def choose(text: str | None, env: Mapping[str, str]) -> tuple[Choice, ...]:
    """What `--track` says: names with commas between them, each alone or as `NAME:online`.

    Raises:
        UserError: an unknown tracker, one that is not installed, or one with no server to send to.
    """
    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    choices = [_choice(word, env) for word in words]
    names = [choice.name for choice in choices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{twice} is named twice", where=f"--track {text}", instead=f"{twice} or {twice}:{_ONLINE}")
    return tuple(choices)


def _choice(word: str, env: Mapping[str, str]) -> Choice:
    name, colon, how = word.partition(":")
    if name not in _NEEDS:
        raise unknown("tracker", name, _NEEDS, where="--track")
    if colon and how != _ONLINE:
        raise UserError(f"{how!r} is no way to track", where=f"--track {word}",
                        instead=f"{name} (into the run directory alone) or {name}:{_ONLINE}")
    online = bool(colon)
    if online and name == "tensorboard":
        raise UserError("TensorBoard has no server to send to", where=f"--track {word}", instead=f"--track {name}")
    if online and name == "mlflow" and not env.get(_MLFLOW_SERVER):
        raise UserError(f"{_MLFLOW_SERVER} does not say which server to send to", where=f"--track {word}",
                        instead=f"set {_MLFLOW_SERVER}, or --track {name} to write into the run directory")
    if missing := [package for package in _NEEDS[name] if find_spec(package) is None]:
        raise UserError(f"{name} needs {' and '.join(missing)}, not installed here", where=f"--track {word}",
                        instead=f"pip install 'ezpz_llm[{name}]'")
    return Choice(name, online)
