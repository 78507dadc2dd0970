"""The run's secret: what the processes of one run know, and other users of their nodes do not.

launch draws it and hands it on in the environment, which the kernel shows to the same user alone, and which every
launcher passes on by its own channels: on command lines it stands by its name at most. It is never a path name, an
argument, or in a file. The run's id (`EZPZ_LLM_RUN_ID`) is no secret: it only names the run.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

SECRET_VARIABLE = "EZPZ_LLM_SECRET"
_BYTES = 32


def new_secret() -> str:
    """A secret for one run, as the value of its variable."""
    return os.urandom(_BYTES).hex()


def run_secret(env: Mapping[str, str]) -> bytes | None:
    """The secret of the run that `env` belongs to; None where no launch gave one."""
    try:
        found = bytes.fromhex(env.get(SECRET_VARIABLE, ""))
    except ValueError:
        return None
    return found if len(found) == _BYTES else None


def derived(secret: bytes, *purpose: str) -> str:
    """A word for one purpose, which tells nothing of the secret or of its words for other purposes."""
    return hmac.new(secret, "\0".join(purpose).encode(), hashlib.sha256).hexdigest()
