"""Processes below a node's shims that do not carry the run's marker: noted by the agent while they can be told by
their descent, since they cannot any more once their shim is killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from ezpz_llm.base.private import PrivateFolder
from ezpz_llm.launch.node.descent import Kin, below, everyone
from ezpz_llm.launch.node.folder import STRAYS, registered
from ezpz_llm.launch.node.processes import Process


class Strays:
    """Remembers them from one look to the next."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self.known: set[Kin] = set()

    def look(self, processes: Iterable[Process]) -> None:
        """Note those that there are now. `processes` are all that carry the marker."""
        seen = everyone(is_own_only=True)
        of_ranks = {one.pid for one in processes if one.rank is not None}
        # Launchers, shims and what they forked: what belongs to a rank is below these.
        others = {os.getpid(), *(one.pid for one in processes if one.rank is None)}
        roots = {*self.roots(), *(Kin(pid, seen[pid].start) for pid in of_ranks if pid in seen)}
        now = {who for who in below(seen, roots, others) if who.pid not in of_ranks}
        if now != self.known:
            self.known = now
            self._write()

    def roots(self) -> set[Kin]:
        """What they, and their own children, descend from."""
        return self.known | {Kin.parse(who) for who in registered(self._folder).values() if " " in who}

    def _write(self) -> None:
        # For the janitors, should the agent be killed too.
        with contextlib.suppress(OSError):
            self._folder.write(STRAYS, "".join(f"{who}\n" for who in self.known).encode())
