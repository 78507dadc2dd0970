"""Job scripts of all schedulers end with the same lines, which each repeats because users copy single files."""

from __future__ import annotations

import re

from ezpz_llm.core.base import data_dir


def test_script_after_the_command_is_the_same_for_every_scheduler() -> None:
    texts = {path.name: path.read_text() for path in sorted(data_dir("jobs").glob("*.sh"))}
    assert len(texts) >= 4
    tails = {name: re.sub(r"job \$\w+:", "job $ID:", text.split("\n# ---- run (the same for every job)\n")[1])
             for name, text in texts.items()}
    assert all("$ID" in tail for tail in tails.values())
    assert len(set(tails.values())) == 1, [name for name, tail in tails.items() if tail != tails["slurm.sh"]]
