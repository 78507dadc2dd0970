"""Commands that are printed after a run, one per line, to copy and paste."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ezpz_llm.core.base import UserError
from ezpz_llm.core.base.shell_commands import to_typable
from ezpz_llm.launcher.basics.messages import read_stop_order
from ezpz_llm.launcher.basics.variables import RUN_ID_VARIABLE
from ezpz_llm.launcher.jobs.option_parsing import program_file, read_command
from ezpz_llm.training.data.tokenizers import Tokenizer
from ezpz_llm.training.layout.value_source import Origin
from ezpz_llm.training.trainer.session import Session

_PROMPTS = ("Hello, I'm a language model,", " ")
"""Prompts to try: the default of `generate`, and a space, which nearly every tokenizer can encode."""


def next_commands(session: Session, failed: bool) -> str:
    """Return the commands that a user may want next, with their purposes. Some require a checkpoint.

    Args:
        failed: the run failed, and would fail again if it were resumed.
    """
    run_dir = shlex.quote(_relative_to_cwd(session.dist.run_dir.path))
    commands = [("see its curves", f"ezpz-llm report {run_dir}"),
                ("see where the time went", f"ezpz-llm explain {run_dir}")]
    if session.checkpoints.latest_step is not None:
        prompt = _prompt_option(session.data.tokens.tokenizer)
        commands.append(("write text with it", f"ezpz-llm generate {run_dir}{prompt}"))
        if not failed and not _is_stopped_by_launch(session):
            purpose = "continue it" if session.step < session.config.steps else "train it further"
            commands.append((purpose, _resume_command(session, run_dir)))
    width = max(len(purpose) for purpose, _ in commands)
    return "next\n" + "".join(f"  {purpose:<{width}}  {to_typable(command)}\n" for purpose, command in commands)


def _relative_to_cwd(path: Path) -> str:
    """Return `path` relative to the working directory if it is inside, else unchanged."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def _prompt_option(tokenizer: Tokenizer) -> str:
    """Return a --prompt option that the tokenizer can encode, or an empty string if no option is needed or none
    works."""
    for prompt in _PROMPTS:
        try:
            tokenizer.encode(prompt)
        except UserError:  # a character that is not in the corpus
            continue
        return "" if prompt == _PROMPTS[0] else f" --prompt {shlex.quote(prompt)}"
    return ""


def _resume_command(session: Session, run_dir: str) -> str:
    config = session.config
    launch = f"launch -n {session.dist.world_size} " if RUN_ID_VARIABLE in os.environ else ""
    steps = f" --steps {2 * config.steps}" if session.step >= config.steps else ""
    # --resume restores the run's settings, but not its device.
    device = "" if session.plan.sources["device"].origin is Origin.DEFAULT else f" --device {config.device}"
    return f"{launch}{program(sys.orig_argv)} --resume {run_dir}{steps}{device}"


def _is_stopped_by_launch(session: Session) -> bool:
    """Return True if launch is ending the run; it then prints the command that resumes."""
    run_id = os.environ.get(RUN_ID_VARIABLE)
    return run_id is not None and read_stop_order(session.dist.run_dir, run_id) is not None


def program(command: Sequence[str]) -> str:
    """Return the trainer as `command` runs it: the module, or a script that calls `ezpz_llm.train.train`."""
    words = tuple(command)
    name = program_file(words, read_command(words))
    return f"python3 {shlex.quote(name)}" if name.endswith(".py") else "python3 -m ezpz_llm.train"
