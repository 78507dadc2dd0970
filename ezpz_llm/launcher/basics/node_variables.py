"""Environment variables whose values hold only on the node of launch, such as a device mask with UUIDs.

mpiexec passes launch's environment to the ranks of all nodes. Variables that hold only on this node are taken out
of it, so that other nodes keep the values of their own daemons, and travel in EZPZ_LLM_NODE_VARIABLES, from which
the shims of this node restore them. `environment.variables_of_this_node` selects them.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping, MutableMapping

from ezpz_llm.core.base import parse_json
from ezpz_llm.launcher.basics.variables import NODE_VARIABLES_VARIABLE

_INDEX = re.compile(r"-?\d+(\.\d+)?")


def has_uuids(mask: str) -> bool:
    """Return True if a device mask names devices other than by index ("0", or "0.1" for a tile)."""
    return any(not _INDEX.fullmatch(word) for word in filter(None, map(str.strip, mask.split(","))))


def pack_variables(variables: Mapping[str, str]) -> str:
    """Return the value of EZPZ_LLM_NODE_VARIABLES."""
    return json.dumps({"node": socket.gethostname(), "variables": dict(variables)})


def restore_variables(env: MutableMapping[str, str]) -> None:
    """Set the variables of this node in `env`, unless the launcher has set them, and remove the packed form."""
    if not (text := env.pop(NODE_VARIABLES_VARIABLE, "")):
        return
    packed = parse_json(text, NODE_VARIABLES_VARIABLE)
    if packed["node"] == socket.gethostname():
        for name, value in packed["variables"].items():
            env.setdefault(name, value)
