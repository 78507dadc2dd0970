"""`run.json`: what ran, with what, where, and what came out. Secrets are redacted on the way in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Any

from ezpz_llm.base import outside
from ezpz_llm.base.errors import UserError
from ezpz_llm.base.schema import as_type
from ezpz_llm.rundir.files import write_json
from ezpz_llm.rundir.paths import RunDir
from ezpz_llm.rundir.schemas import Record
from ezpz_llm.rundir.secrets import without_secrets

_LOCK_TRIES = 100
_OTHER = "another run directory, or remove the file"


def read_record(run_dir: RunDir) -> dict[str, Any]:
    """The record as it stands; empty where there is none yet.

    Raises:
        UserError: it cannot be read, or is not what we write there.
    """
    try:
        record = outside.read_json(run_dir.record)
    except outside.NoFile:
        return {}
    except UserError as error:
        raise UserError(error.found, where=error.where, instead=_OTHER) from error
    if not isinstance(record, dict):
        raise UserError("run.json is not a run's record", where=str(run_dir.record), instead=_OTHER)
    return as_type(Record, record, str(run_dir.record))


def update_record(run_dir: RunDir, **members: Any) -> None:
    """Set top-level members of run.json. `launch` writes before and after, rank 0 between; `submit` may still be
    writing when its job begins."""
    with _alone(run_dir):
        write_json(run_dir.record, {**read_record(run_dir), **without_secrets(members, os.environ)})


@contextlib.contextmanager
def _alone(run_dir: RunDir) -> Iterator[None]:
    """Keep other writers out meanwhile, where the file system has locks, and for a second at most."""
    folder = os.open(run_dir.path, os.O_RDONLY)
    try:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(1 / _LOCK_TRIES)
            except OSError:
                break
        yield
    finally:
        os.close(folder)
