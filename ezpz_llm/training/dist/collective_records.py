"""Record of each rank's latest collectives, written to the run directory when ranks hang.

torch's flight recorder keeps the record. NCCL writes it when a collective times out, and this module when launch's
agent asks for stacks. `ezpz-llm why` compares the records (launcher/diagnosis/collective_differences.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import MutableMapping
from pathlib import Path

import torch

from ezpz_llm.core.base import system_text
from ezpz_llm.core.rundir import RunDir, write_atomic
from ezpz_llm.launcher.basics.node_folder import COLLECTIVES, RECORDED, file_of
from ezpz_llm.launcher.basics.variables import STACKS_VARIABLE
from ezpz_llm.training.dist.torch_internals import record_of_collectives

_ENTRIES = 2000
"""Collectives in a record, which has about 300 bytes for each."""
_POLL_S = 0.2

# torch 2.9 renamed both variables, and warns about the old names.
_HAS_NEW_NAMES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
_SIZE_VARIABLE = "TORCH_FR_BUFFER_SIZE" if _HAS_NEW_NAMES else "TORCH_NCCL_TRACE_BUFFER_SIZE"
_FILE_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE" if _HAS_NEW_NAMES else "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_DUMP_VARIABLE = "TORCH_NCCL_DUMP_ON_TIMEOUT"
VARIABLES = _SIZE_VARIABLE, _FILE_VARIABLE, _DUMP_VARIABLE
"""Variables that this module sets."""


def keep_records(env: MutableMapping[str, str]) -> None:
    """Set the variables that turn the flight recorder on. Call before the process group is created."""
    env.setdefault(_SIZE_VARIABLE, str(_ENTRIES))
    env.setdefault(_DUMP_VARIABLE, "1")


class CollectiveRecords:
    """Writer of this rank's record, in a thread that runs until `close`.

    The thread also writes while the main thread waits in a collective. A signal handler in Python could not.
    """

    def __init__(self, env: MutableMapping[str, str], run_dir: RunDir, rank: int, backend: str) -> None:
        env.setdefault(_FILE_VARIABLE, str(run_dir.collectives / "rank"))
        self._path, self._backend = run_dir.rank_collectives(rank), backend
        self._closed = threading.Event()
        if env.get(STACKS_VARIABLE):
            folder = Path(env[STACKS_VARIABLE]).parent
            files = folder / COLLECTIVES, folder / file_of(rank, RECORDED)
            threading.Thread(target=self._write_on_request, args=files, name="collective records",
                             daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _write_on_request(self, request: Path, recorded: Path) -> None:
        with contextlib.suppress(OSError):  # without the node's folder, nobody asks
            token = ""
            recorded.write_text(token)
            while not self._closed.wait(_POLL_S):
                if (asked := system_text(request)) in ("", token):
                    continue
                token = asked
                if (record := record_of_collectives(self._backend)) is not None:
                    write_atomic(self._path, record)
                recorded.write_text(token)
