"""Job scripts of all schedulers run a job in the same way; each is whole, since it is copied and queued alone."""

from __future__ import annotations

import re

from ezpz_llm.base import data_dir


def test_what_follows_the_command_is_the_same_for_every_scheduler() -> None:
    texts = {path.name: path.read_text() for path in sorted(data_dir("jobs").glob("*.sh"))}
    assert len(texts) >= 4
    tails = {name: re.sub(r"job \$\w+:", "job $ID:", text.split("\n# ---- run (the same for every job)\n")[1])
             for name, text in texts.items()}
    assert all("$ID" in tail for tail in tails.values())
    assert len(set(tails.values())) == 1, [name for name, tail in tails.items() if tail != tails["slurm.sh"]]
