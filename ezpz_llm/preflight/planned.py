"""What the plan of this launch says: the host of each rank, and the site's network."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from ezpz_llm.errors import UserError
from ezpz_llm.launch.sites import find_site
from ezpz_llm.rundir import RunDir, read_record


def planned_hosts(run_dir: RunDir, world_size: int) -> list[str]:
    """The host of each rank, from launch's record; empty without one, or where it is of another world."""
    launch = read_record(run_dir).get("launch", {})
    hosts, counts = launch.get("hosts", []), launch.get("ranks_per_host", [])
    table = [host for host, count in zip(hosts, counts, strict=False) for _ in range(count)]
    return table if len(table) == world_size else []


def site_network(env: Mapping[str, str]) -> str | None:
    """The network that this site's communication library should choose; None where no site says."""
    # launch has read the same file before and refused a broken one.
    with contextlib.suppress(UserError):
        return find_site(None, env).network
    return None
