"""Checkpoints that cases save before their last step, and that later cases load."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ezpz_llm.core.base import read_json
from ezpz_llm.core.base.records import as_plain, as_record
from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.dist import Dist
from ezpz_llm.training.dist.agreement import broadcast
from ezpz_llm.verify.certify.local_launches import MIDDLE


@dataclass(frozen=True)
class Source:
    """Layout and world size of a case that passed, and the folder of its checkpoints."""

    layout: str
    world: int
    folder: Path


class MiddleCheckpoints:
    """Checkpoints of a case, and of earlier cases that passed and have the same reference.

    Collective in all methods.

    Attributes:
        own: folder for the checkpoint of this case.
        loaded: the layout whose checkpoint the case loads.
    """

    def __init__(self, root: Path, name: str, layout: str, world: int, dist: Dist) -> None:
        """Choose a checkpoint to load: of the layout on another number of ranks, or else of the latest case.

        Args:
            root: the run directory.
            name: name of the reference, of which cases share checkpoints.
        """
        self._folder, self._dist = root / MIDDLE / name, dist
        self._passed = broadcast(dist, self._read_passed())
        self._layout, self._world = layout, world
        self.own = self._folder / "own"
        latest = self._passed[-1] if self._passed else Source(layout, world, self.own)
        others = (case for case in self._passed if case.layout == layout and case.world != world)
        self._source = next(others, latest)
        self.loaded = self._source.layout
        self._remove(self.own)

    @property
    def chosen(self) -> Path:
        """Folder of the checkpoint that the case loads: its own if no other case has passed."""
        return self._source.folder

    def close(self, *, passed: bool) -> None:
        """Keep this case's checkpoint for later cases if it passed, instead of an older one of its layout."""
        self._dist.barrier()
        if self._dist.is_main and passed:
            older = [case for case in self._passed if case.layout == self._layout]
            number = max((int(case.folder.name) for case in self._passed), default=0) + 1
            kept = Source(self._layout, self._world, self._folder / str(number))
            shutil.rmtree(kept.folder, ignore_errors=True)
            self.own.rename(kept.folder)
            write_json(self._folder / "passed.json",
                       as_plain([*(case for case in self._passed if case not in older), kept]))
            for case in older:
                shutil.rmtree(case.folder)
        self._remove(self.own)

    def _read_passed(self) -> list[Source]:
        path = self._folder / "passed.json"
        return as_record(list[Source], read_json(path), str(path)) if path.is_file() else []

    def _remove(self, folder: Path) -> None:
        if self._dist.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        self._dist.barrier()
