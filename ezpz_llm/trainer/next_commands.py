"""Commands to type after a run, each as a line to copy."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from ezpz_llm.base import UserError
from ezpz_llm.base.shell_commands import typable
from ezpz_llm.data.tokenizers import Tokenizer
from ezpz_llm.launch.variables import RUN_ID_VARIABLE
from ezpz_llm.layout.value_source import Origin
from ezpz_llm.trainer.session import Session

_PROMPTS = ("Hello, I'm a language model,", " ")
"""Prompts: the default of `generate`, and one that nearly every text can continue."""


def next_commands(session: Session) -> str:
    """Return the commands that a user may want next, each below its purpose; fewer without a checkpoint."""
    place = shlex.quote(_short(session.dist.run_dir.path))
    found = [("see its curves", f"ezpz-llm report {place}"),
             ("see where the time went", f"ezpz-llm explain {place}")]
    if session.saved_step is not None:
        found.append(("write text with it", f"ezpz-llm generate {place}{_prompt(session.data.tokenizer)}"))
        # What broke a run breaks it again.
        if not (session.failed or session.spikes.last_loss_non_finite):
            found.append(("train it further", _resume(session, place)))
    width = max(len(what) for what, _ in found)
    return "next\n" + "".join(f"  {what:<{width}}  {typable(command)}\n" for what, command in found)


def _short(path: Path) -> str:
    """The path from here where it lies below this folder, else whole."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def _prompt(tokenizer: Tokenizer) -> str:
    """The option that gives a prompt which the tokenizer knows; empty where generate's own will do."""
    for prompt in _PROMPTS:
        try:
            tokenizer.encode(prompt)
        except UserError:  # a character that the corpus has not
            continue
        return "" if prompt == _PROMPTS[0] else f" --prompt {shlex.quote(prompt)}"
    return ""


def _resume(session: Session, place: str) -> str:
    config = session.config
    launch = f"launch -n {session.dist.world_size} " if RUN_ID_VARIABLE in os.environ else ""
    steps = f" --steps {2 * config.steps}" if session.step >= config.steps else ""
    # The settings of a run are taken from it; the device is each start's own.
    device = "" if session.plan.sources["device"].origin is Origin.DEFAULT else f" --device {config.device}"
    return f"{launch}python3 -m ezpz_llm.train --resume {place}{steps}{device}"
