"""Hostfile lines from other launchers: each message says why the line is not accepted and what to write."""

from __future__ import annotations

import pytest

from ezpz_llm.core.base import UserError
from ezpz_llm.launcher.jobs import hostfile


@pytest.mark.parametrize(("line", "problem", "instead"), [
    ("user@10.10.1.10 slots=2", "cannot set the user", "`User user` under `Host 10.10.1.10`"),
    ("n1 slots=2 max_slots=4", "max_slots", "`n1 slots=N`"),
    ("n1 max-slots=4", "max_slots", "`n1 slots=N`"),
    ("[2001:db8::1] slots=2", "IPv6", "IPv4"),
    ("2001:db8::1", "IPv6", "IPv4"),
    ("fe80::1%eth0", "IPv6", "IPv4"),
    ("n1 4", "the number of ranks needs the key slots", "`n1 slots=4`"),
    ("n1 slots=0", "'0' is not a number of ranks", "host slots=N"),
    ("n1:a", "'a' is not a number of ranks", "host:N"),
    ("n1 slots=2 gpus=4", "not gpus", "`n1 slots=N`"),
    ("n[1-4] slots=2", "a list of hosts", "--hosts"),
    ("n1,n2", "a list of hosts", "--hosts"),
    ("rank 0=n1 slot=0", "rankfile", "slots=N"),
    ("Host n1", "ssh configuration", "`n1`"),
    ("ssh://n1", "URL", "one hostname per line"),
])
def test_a_line_of_another_tool_is_explained(line: str, problem: str, instead: str) -> None:
    with pytest.raises(UserError, match="not a hostfile line") as caught:
        hostfile.parse(f"n0\n{line}\n", "hosts")
    assert problem in caught.value.found
    assert caught.value.where == "hosts, line 2"
    assert instead in str(caught.value.instead)
