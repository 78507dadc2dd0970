"""Writer of this rank's record of its latest collectives, when launch's agent orders stacks.

torch's flight recorder keeps the record. launcher/diagnosis/collective_differences.py compares the ranks' records.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import MutableMapping
from pathlib import Path

import torch

from ezpz_llm.core.base import system_text
from ezpz_llm.core.rundir import RunDir, write_atomic
from ezpz_llm.launcher.basics.collective_record import record_path, reduce_dumps, timeout_dump_prefix, to_json
from ezpz_llm.launcher.basics.node_folder import COLLECTIVES
from ezpz_llm.launcher.basics.variables import STACKS_VARIABLE
from ezpz_llm.training.dist.torch_internals import dump_collectives

_ENTRIES = 2000
_POLL_S = 0.2

# torch 2.9 renamed the first two variables, and warns about the old names.
_SIZE_VARIABLES = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_FILE_VARIABLES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_DUMP_VARIABLE = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_OLD_NAMES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
VARIABLES = _SIZE_VARIABLES[_OLD_NAMES], _FILE_VARIABLES[_OLD_NAMES], _DUMP_VARIABLE
"""Variables that this module sets."""


def keep_records(env: MutableMapping[str, str]) -> None:
    """Set the variables that turn the flight recorder on, unless the user has set them.

    Call before the process group is created.
    """
    if not any(name in env for name in _SIZE_VARIABLES):
        env[VARIABLES[0]] = str(_ENTRIES)
    env.setdefault(_DUMP_VARIABLE, "1")


class CollectiveRecords:
    """Writer of this rank's record, in a thread that runs until `close`.

    The thread also writes while the main thread waits in a collective. A signal handler in Python could not.
    """

    def __init__(self, env: MutableMapping[str, str], run_dir: RunDir, rank: int) -> None:
        if not any(name in env for name in _FILE_VARIABLES):
            env[VARIABLES[1]] = timeout_dump_prefix(run_dir)
        self._path = record_path(run_dir, rank)
        sizes = [env[name] for name in _SIZE_VARIABLES if env.get(name, "").isdigit()]
        self._buffer_size = int(sizes[0]) if sizes else _ENTRIES
        self._closed = threading.Event()
        if env.get(STACKS_VARIABLE):
            order = Path(env[STACKS_VARIABLE]).parent / COLLECTIVES
            threading.Thread(target=self._write_on_order, args=(order,), name="collective records",
                             daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _write_on_order(self, order: Path) -> None:
        executed = system_text(order)
        while not self._closed.wait(_POLL_S):
            if (token := system_text(order)) in ("", executed):
                continue
            executed = token
            with contextlib.suppress(Exception):  # training does not depend on the record
                dumps = [pickle.loads(dump) for dump in dump_collectives()]
                write_atomic(self._path, to_json(reduce_dumps(dumps, token, self._buffer_size)))
