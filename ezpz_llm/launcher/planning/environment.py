"""Environment variables that launch sets for ranks, each with its source or reason."""

from __future__ import annotations

import shutil
import sys
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from ezpz_llm.core.base import (
    SECRET_VARIABLE,
    UserError,
    extensions_dir,
    new_secret,
    shorten_value,
    user_path,
    whole_number,
)
from ezpz_llm.core.rundir import RUN_DIR_VARIABLE, RunDir
from ezpz_llm.launcher.basics.addresses import Rendezvous
from ezpz_llm.launcher.basics.devices import DRIVER_SOURCES, MASKS, Devices
from ezpz_llm.launcher.basics.hostlist import fold_counts
from ezpz_llm.launcher.basics.node_variables import has_uuids, pack_variables
from ezpz_llm.launcher.basics.variables import (
    BIND_VARIABLE,
    DEVICES_VARIABLE,
    ENDS_AT_VARIABLE,
    EXTENSIONS_VARIABLE,
    FORWARDED,
    FORWARDED_PREFIXES,
    IN_COLOR,
    LOG_BYTES_VARIABLE,
    NODE_VARIABLES_VARIABLE,
    RANKS_OWN,
    RANKS_PER_NODE_VARIABLE,
    RUN_ID_VARIABLE,
    SITE_VARIABLE,
    TEE_VARIABLE,
    TERMINAL_VARIABLE,
    TORCHELASTIC_VARIABLE,
    WORLD_SIZE_VARIABLE,
)
from ezpz_llm.launcher.jobs.option_parsing import Options
from ezpz_llm.launcher.jobs.schedulers import is_set_by_scheduler, rank_names
from ezpz_llm.launcher.jobs.schedulers.scheduler import Allocation
from ezpz_llm.launcher.planning.placement import Placement
from ezpz_llm.launcher.planning.rank_binding import Binding
from ezpz_llm.launcher.planning.sites import Site

RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


class Setting(NamedTuple):
    """Value of an environment variable that launch sets, and its source or reason."""

    value: str
    source: str


def run_settings(run_dir: RunDir, run_id: str, placement: Placement, allocation: Allocation,
                 options: Options, env: Mapping[str, str]) -> dict[str, Setting]:
    """Return the variables that describe the run to its ranks.

    Raises:
        UserError: EZPZ_LLM_LOG_BYTES is not a whole number.
    """
    if whole_number(env.get(LOG_BYTES_VARIABLE) or "1") is None:
        raise UserError(f"{LOG_BYTES_VARIABLE} is {shorten_value(env[LOG_BYTES_VARIABLE])}, not a whole number",
                        instead="the maximum size of a rank's log in bytes, such as 10000000000")
    settings = {
        **rank_settings(),
        RUN_DIR_VARIABLE: Setting(str(run_dir.path), "launch"),
        RUN_ID_VARIABLE: Setting(run_id, "launch"),
        SECRET_VARIABLE: Setting(new_secret(), "launch: secret shared by the processes of this run"),
        WORLD_SIZE_VARIABLE: Setting(str(placement.world_size), placement.source),
        RANKS_PER_NODE_VARIABLE: Setting(fold_counts([count for _, count in placement.ranks]), placement.source),
        TEE_VARIABLE: Setting(options.tee, "--tee"),
    }
    if allocation.ends_at is not None:
        settings[ENDS_AT_VARIABLE] = Setting(f"{allocation.ends_at:.0f}", allocation.scheduler)
    return settings


def rank_settings() -> dict[str, Setting]:
    """Return the variable that tells ranks in which variables step launchers pass rank numbers."""
    return {name: Setting(value, "the step launchers of other packages") for name, value in rank_names().items()}


def terminal_settings(options: Options, env: Mapping[str, str]) -> dict[str, Setting]:
    """Return the variable that holds the width of rank 0's terminal and whether rank 0 may use color.

    If output goes to a file or to a terminal that cannot redraw lines, an inherited value is replaced with an empty
    one. See https://no-color.org.
    """
    is_live = options.tee == "0" and sys.stdout.isatty() and env.get("TERM", "dumb") != "dumb"
    if not is_live and TERMINAL_VARIABLE not in env:
        return {}
    value = f"{shutil.get_terminal_size().columns}{'' if env.get('NO_COLOR') else IN_COLOR}" if is_live else ""
    return {TERMINAL_VARIABLE: Setting(value, "the terminal in which launch runs")}


def python_settings(env: Mapping[str, str]) -> dict[str, Setting]:
    """Return variables that make Python flush output immediately and print a traceback on a crash."""
    reasons = {"PYTHONUNBUFFERED": "launch: show lines as they are printed",
               "PYTHONFAULTHANDLER": "launch: print a Python traceback on a crash in native code"}
    return {name: Setting("1", reason) for name, reason in reasons.items() if name not in env}


def extension_settings(env: Mapping[str, str]) -> dict[str, Setting]:
    """Return the variable for the directory where torch compiles extensions, such as DeepSpeed's ops.

    Each Python environment has its own directory in the cache. launch searches that directory for locks left by
    killed builds.
    """
    if env.get(EXTENSIONS_VARIABLE):
        return {}
    python = f"{zlib.crc32(sys.prefix.encode()):08x}"
    try:
        folder = extensions_dir(env) / f"py{sys.version_info.major}{sys.version_info.minor}-{python}"
    except UserError:
        # No home directory: leave the choice to torch.
        return {}
    return {EXTENSIONS_VARIABLE: Setting(str(folder), "launch: compile extensions in the cache")}


def rendezvous_settings(rendezvous: Rendezvous, env: Mapping[str, str]) -> dict[str, Setting]:
    """Return MASTER_ADDR and MASTER_PORT, unless the user set them."""
    settings = {"MASTER_ADDR": Setting(rendezvous.address, rendezvous.address_source),
                "MASTER_PORT": Setting(str(rendezvous.port), rendezvous.port_source)}
    return {name: setting for name, setting in settings.items() if not is_users_choice(name, env)}


def site_settings(site: Site, options: Options, env: Mapping[str, str]) -> dict[str, Setting]:
    """Return the variables of the site file, and EZPZ_LLM_SITE."""
    settings = {name: Setting(value, f"site {site.name}") for name, value in site.env.items() if name not in env}
    user_site = options.site or env.get(SITE_VARIABLE)
    if user_site and ("/" in user_site or user_site.endswith(".toml")):
        # Absolute, since the command may change its working directory.
        settings[SITE_VARIABLE] = Setting(str(user_path(user_site).absolute()), site.source)
    elif site.name != Site().name:
        settings[SITE_VARIABLE] = Setting(site.name, site.source)
    return settings


def interface_settings(interface: str | None, source: str, env: Mapping[str, str]) -> dict[str, Setting]:
    """Return the variables that select the network interface of gloo and NCCL (or RCCL)."""
    if interface is None:
        return {}
    return {name: Setting(interface, source) for name in _INTERFACE_VARIABLES if not is_users_choice(name, env)}


def device_settings(devices: Devices) -> dict[str, Setting]:
    """Return the variable with the accelerators that only the scheduler or the site file names."""
    if not devices.ids or devices.source in (*MASKS, *DRIVER_SOURCES):
        return {}
    return {DEVICES_VARIABLE: Setting(f"{len(devices.ids)} {devices.source}", devices.source)}


def binding_settings(binding: Binding, mask: tuple[str, ...], site: Site,
                     env: Mapping[str, str]) -> dict[str, Setting]:
    """Return variables for the number of OpenMP threads, the cores of each rank (for the shim), and its devices.

    Args:
        mask: devices in the site's order; empty for the default order.
    """
    settings = {}
    if binding.cores_per_rank is not None and not is_users_choice("OMP_NUM_THREADS", env):
        settings["OMP_NUM_THREADS"] = Setting(str(binding.cores_per_rank), "cores of each rank")
    if binding.by_shim:
        settings[BIND_VARIABLE] = Setting(":".join(binding.cores), "the launcher has no option for core binding")
    if mask:
        source = f"site {site.name}: local rank 0 uses device {mask[0]}"
        settings["CUDA_VISIBLE_DEVICES"] = Setting(",".join(mask), source)
    return settings


def is_users_choice(name: str, env: Mapping[str, str]) -> bool:
    """Return True if the user set this variable, rather than the scheduler, an outer launch or torchrun."""
    if not env.get(name) or RUN_ID_VARIABLE in env:
        return False
    by_torchrun = name in RENDEZVOUS_VARIABLES and TORCHELASTIC_VARIABLE in env
    return not by_torchrun and not is_set_by_scheduler(name, env)


def variables_of_this_node(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `env` that hold only on this node, so that ranks on other nodes do not get them.

    - A device mask that a scheduler set, or that lists UUIDs, names devices of this node. OpenPBS's cgroup hook,
      for example, gives the tasks of each node a mask with the UUIDs of that node.
    - A mask of indices that the user set holds for all nodes.
    - OMP_NUM_THREADS holds for all nodes, unless the scheduler set it to the job's cores on this node.
    """
    return {name: env[name] for name in (*MASKS, "OMP_NUM_THREADS") if name in env
            and (is_set_by_scheduler(name, env) or (name in MASKS and has_uuids(env[name])))}


def node_settings(of_this_node: Mapping[str, str]) -> dict[str, Setting]:
    """Return the variable with which ranks on this node get its own variables."""
    source = f"the values of {', '.join(of_this_node)} hold only on this node"
    return {NODE_VARIABLES_VARIABLE: Setting(pack_variables(of_this_node), source)} if of_this_node else {}


def forwarded_names(env: Mapping[str, str], settings: Mapping[str, Setting]) -> tuple[str, ...]:
    """Return the names of the variables to pass to ranks on other nodes."""
    of_this_node = variables_of_this_node(env)
    inherited = [name for name in env if name not in RANKS_OWN and name not in of_this_node
                 and (name in (*FORWARDED, *MASKS) or name.startswith(FORWARDED_PREFIXES))]
    return tuple(sorted({*inherited, *settings, *(set(RENDEZVOUS_VARIABLES) & env.keys())}))
