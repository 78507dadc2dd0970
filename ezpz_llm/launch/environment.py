"""The variables that launch sets for ranks, each with the reason; what the user has set stays."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ezpz_llm.base import SECRET_VARIABLE, UserError, extensions_dir, new_secret, shown, user_path, whole_number
from ezpz_llm.launch.addresses import Rendezvous
from ezpz_llm.launch.binding.choose import Binding
from ezpz_llm.launch.hostlist import fold_counts
from ezpz_llm.launch.option_parsing import Options
from ezpz_llm.launch.placement import Placement
from ezpz_llm.launch.schedulers import rank_names
from ezpz_llm.launch.schedulers.scheduler import Allocation
from ezpz_llm.launch.sites import Site
from ezpz_llm.launch.variables import (
    BIND_VARIABLE,
    ENDS_AT_VARIABLE,
    EXTENSIONS_VARIABLE,
    FORWARDED,
    FORWARDED_PREFIXES,
    IN_COLOUR,
    LOG_BYTES_VARIABLE,
    RANKS_OWN,
    RANKS_PER_NODE_VARIABLE,
    RUN_ID_VARIABLE,
    SITE_VARIABLE,
    TEE_VARIABLE,
    TERMINAL_VARIABLE,
    TORCHELASTIC_VARIABLE,
    WORLD_SIZE_VARIABLE,
)
from ezpz_llm.rundir import RUN_DIR_VARIABLE, RunDir

RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class Setting:
    """One environment variable that launch sets, and why."""

    value: str
    source: str


def run_settings(run_dir: RunDir, run_id: str, placement: Placement, allocation: Allocation,
                 options: Options, env: Mapping[str, str]) -> dict[str, Setting]:
    """What tells a rank of its run.

    Raises:
        UserError: the size that the user wants logs to have is none.
    """
    if whole_number(env.get(LOG_BYTES_VARIABLE) or "1") is None:
        raise UserError(f"{LOG_BYTES_VARIABLE} is {shown(env[LOG_BYTES_VARIABLE])}",
                        instead="the bytes that a rank's log may have, such as 10000000000")
    settings = {
        **rank_settings(),
        RUN_DIR_VARIABLE: Setting(str(run_dir.path), "launch"),
        RUN_ID_VARIABLE: Setting(run_id, "launch"),
        SECRET_VARIABLE: Setting(new_secret(), "launch: what only this run's processes know"),
        WORLD_SIZE_VARIABLE: Setting(str(placement.world_size), placement.source),
        RANKS_PER_NODE_VARIABLE: Setting(fold_counts([count for _, count in placement.ranks]), placement.source),
        TEE_VARIABLE: Setting(options.tee, "--tee"),
    }
    if allocation.ends_at is not None:
        settings[ENDS_AT_VARIABLE] = Setting(f"{allocation.ends_at:.0f}", allocation.scheduler)
    return settings


def rank_settings() -> dict[str, Setting]:
    """By which variables the launcher of another package numbers ranks."""
    return {name: Setting(value, "the step launchers of other packages") for name, value in rank_names().items()}


def terminal_settings(options: Options, env: Mapping[str, str]) -> dict[str, Setting]:
    """The width of the terminal that shows rank 0's output as it comes, where there is one that redraws lines, and
    whether it wants colours (https://no-color.org)."""
    shows = options.tee == "0" and sys.stdout.isatty() and env.get("TERM", "dumb") != "dumb"
    if not shows and TERMINAL_VARIABLE not in env:
        return {}
    told = f"{shutil.get_terminal_size().columns}{'' if env.get('NO_COLOR') else IN_COLOUR}" if shows else ""
    return {TERMINAL_VARIABLE: Setting(told, "the terminal that launch was started in")}


def python_settings(env: Mapping[str, str]) -> dict[str, Setting]:
    """What makes a Python program's output and its end tell more."""
    wanted = {"PYTHONUNBUFFERED": "launch: lines appear as they are printed",
              "PYTHONFAULTHANDLER": "launch: a crash below Python tells where Python was"}
    return {name: Setting("1", why) for name, why in wanted.items() if name not in env}


def extension_settings(env: Mapping[str, str]) -> dict[str, Setting]:
    """Where a script's own libraries, such as DeepSpeed's ops, are compiled on first use: in the cache, each Python
    environment by itself, and where launch can find the lock of a build that was killed."""
    if env.get(EXTENSIONS_VARIABLE):
        return {}
    python = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    try:
        folder = extensions_dir(env) / f"py{sys.version_info.major}{sys.version_info.minor}-{python}"
    except UserError:
        # Without a home directory torch looks for a place itself.
        return {}
    return {EXTENSIONS_VARIABLE: Setting(str(folder), "launch: extensions are compiled in the cache")}


def rendezvous_settings(rendezvous: Rendezvous, env: Mapping[str, str]) -> dict[str, Setting]:
    """Where ranks meet."""
    settings = {"MASTER_ADDR": Setting(rendezvous.address, rendezvous.address_source),
                "MASTER_PORT": Setting(str(rendezvous.port), rendezvous.port_source)}
    return {name: setting for name, setting in settings.items() if not is_users_choice(name, env)}


def site_settings(site: Site, options: Options, env: Mapping[str, str]) -> dict[str, Setting]:
    """The site's own variables, and which site it is."""
    settings = {name: Setting(value, f"site {site.name}") for name, value in site.env.items() if name not in env}
    named = options.site or env.get(SITE_VARIABLE)
    if named and ("/" in named or named.endswith(".toml")):
        # For a command with another working directory.
        settings[SITE_VARIABLE] = Setting(str(user_path(named).absolute()), site.source)
    elif site.name != Site.name:
        settings[SITE_VARIABLE] = Setting(site.name, site.source)
    return settings


def interface_settings(interface: str | None, source: str, env: Mapping[str, str]) -> dict[str, Setting]:
    """The network that gloo and NCCL (or RCCL) open their own connections on."""
    if interface is None:
        return {}
    return {name: Setting(interface, source) for name in _INTERFACE_VARIABLES if not is_users_choice(name, env)}


def binding_settings(binding: Binding, mask: tuple[str, ...], site: Site,
                     env: Mapping[str, str]) -> dict[str, Setting]:
    """Threads for the rank's own cores, cores for the shim to keep to, and `mask`: devices in the site's order."""
    settings = {}
    if binding.cores_per_rank is not None and not is_users_choice("OMP_NUM_THREADS", env):
        settings["OMP_NUM_THREADS"] = Setting(str(binding.cores_per_rank), "cores of each rank")
    if binding.by_shim:
        settings[BIND_VARIABLE] = Setting(":".join(binding.cores), "the launcher has no option for cores")
    if mask:
        why = f"site {site.name}: local rank 0 takes device {mask[0]}"
        settings["CUDA_VISIBLE_DEVICES"] = Setting(",".join(mask), why)
    return settings


def is_users_choice(name: str, env: Mapping[str, str]) -> bool:
    """Did the user set this variable, and neither PBS nor a launch or a torchrun around this one?"""
    if not env.get(name):
        return False
    # PBS exports the job's own number of cores as OMP_NUM_THREADS.
    by_pbs = name == "OMP_NUM_THREADS" and bool(env.get("PBS_JOBID")) and env[name] == env.get("NCPUS")
    by_torchrun = name in RENDEZVOUS_VARIABLES and TORCHELASTIC_VARIABLE in env
    return not by_pbs and not by_torchrun and RUN_ID_VARIABLE not in env


def forwarded(env: Mapping[str, str], settings: Mapping[str, Setting]) -> tuple[str, ...]:
    """The names of the variables that ranks on other hosts need."""
    wanted = [name for name in env if name not in RANKS_OWN
              and (name in FORWARDED or name.startswith(FORWARDED_PREFIXES))]
    return tuple(sorted({*wanted, *settings, *(set(RENDEZVOUS_VARIABLES) & env.keys())}))
