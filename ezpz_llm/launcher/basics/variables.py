"""Names of environment variables and of phases, shared by launch, the shim, and the ranks."""

from __future__ import annotations

RUN_ID_VARIABLE = "EZPZ_LLM_RUN_ID"
"""Id of the run, unique for each launch; marks the processes of the run."""

WORLD_SIZE_VARIABLE = "EZPZ_LLM_WORLD_SIZE"
"""Number of ranks that launch starts."""

ENDS_AT_VARIABLE = "EZPZ_LLM_ENDS_AT"
"""End time of the allocation in epoch seconds; unset if unknown."""

PLACES_VARIABLE = "EZPZ_LLM_PLACES"
"""Nodes and ranks per node in Slurm's compact form, "n[1-2] 4(x2)"; set only for the check of a command."""

SITE_VARIABLE = "EZPZ_LLM_SITE"
"""Site: a name, or the path of its file."""

DEVICES_VARIABLE = "EZPZ_LLM_DEVICES"
"""Accelerators of each node by the scheduler or the site file, and this source: "8 site frontier".

Unset if there are none, and if a mask or a driver determines them.
"""

BIND_VARIABLE = "EZPZ_LLM_BIND"
"""Cores of each local rank ("0-3:4-7") for the shim to bind, if the launcher cannot bind ranks."""

NODE_VARIABLES_VARIABLE = "EZPZ_LLM_NODE_VARIABLES"
"""Name of the node of launch, and variables that hold only there, as JSON; unset if there are none."""

TEE_VARIABLE = "EZPZ_LLM_TEE"
"""Ranks whose output launch prints (--tee): "0", "all" or "none"."""

TERMINAL_VARIABLE = "EZPZ_LLM_TERMINAL"
"""Columns of the terminal that shows rank 0's output, followed by IN_COLOR if color is allowed.

Empty or unset without such a terminal.
"""

IN_COLOR = "+color"

LIVE_LINE = "\x1b[2K\x1b[1K\x1b[2K"
"""Prefix of a status line, which ends with a carriage return, is overwritten in place, and is not logged.

It clears the terminal's line three times, so that a line of another program is unlikely to start with it.
"""

LOG_BYTES_VARIABLE = "EZPZ_LLM_LOG_BYTES"
"""Maximum size of a rank's log in bytes; set by the user."""

FAILURE_TEXTS_VARIABLE = "EZPZ_LLM_FAILURE_TEXTS"
"""Files with failure texts of a site, separated by colons; set by the user or the site file."""

PATH_VARIABLE = "EZPZ_LLM_PATH"
"""launch's PATH, which the shim restores; set only for launchers that change the PATH of ranks."""

SHARED_DEVICES_VARIABLE = "EZPZ_LLM_SHARED_DEVICES"
"""WARN if ranks may share a device, which is an error otherwise; set by the user."""

WARN = "warn"

RANK_VARIABLE = "EZPZ_LLM_RANK"
"""Rank of a process; the shim sets it, and children inherit it."""

LOCAL_RANK_VARIABLE = "EZPZ_LLM_LOCAL_RANK"
"""Rank of a process that launch started without another launcher. All ranks are on one node."""

NODE_DIR_VARIABLE = "EZPZ_LLM_NODE_DIR"
"""Node-local folder of the run (see node/folder.py)."""

HEARTBEAT_VARIABLE = "EZPZ_LLM_HEARTBEAT"
"""Node-local file for the heartbeats of the rank."""

STACKS_VARIABLE = "EZPZ_LLM_STACKS"
"""Node-local file to which the rank writes its stacks on STACKS_SIGNAL."""

RANK_SOURCE_VARIABLE = "EZPZ_LLM_RANK_SOURCE"
"""Source of the rank that the shim set: `RankInfo.source`."""

RANKS_PER_NODE_VARIABLE = "EZPZ_LLM_RANKS_PER_NODE"
"""Planned number of ranks on each node, in Slurm's compact form ("4(x2),1").

If nodes have unequal numbers of ranks, the node rank cannot be computed from the launcher's variables.
"""

RANK_NAMES_VARIABLE = "EZPZ_LLM_RANK_NAMES"
"""Names of the rank variables of plug-in launchers, as JSON; unset if there are none."""

RANKS_OWN = (RANK_VARIABLE, LOCAL_RANK_VARIABLE, RANK_SOURCE_VARIABLE, NODE_DIR_VARIABLE, HEARTBEAT_VARIABLE,
             STACKS_VARIABLE)
"""Variables of a single rank, set by the shim; a launch inside a rank removes them."""

TORCHELASTIC_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Variable that only torchrun sets; its ranks have it."""

TORCHS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "NODE_RANK", "GROUP_RANK",
              "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", TORCHELASTIC_VARIABLE,
              "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
              "TORCHELASTIC_ERROR_FILE")
"""Variables of a single rank that torch reads, set by torchrun, by the shim, or manually."""

EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
"""Directory in which torch compiles extensions."""

STACKS_SIGNAL = 58
"""Signal that makes a rank write its stacks: a real-time signal that no scheduler, MPI or NCCL uses."""

FORWARDED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME")
"""Variables to pass to ranks on other nodes and to jobs, if the launcher or scheduler does not pass all variables.

Variables with a prefix in FORWARDED_PREFIXES are passed too.
"""
FORWARDED_PREFIXES = ("PYTHON", "EZPZ_LLM_", "NCCL_", "RCCL_", "CCL_", "FI_", "UCX_", "GLOO_", "TORCH_", "DS_",
                      "OMP_", "CUDA_", "HSA_", "ZE_", "SYCL_", "HF_", "TIKTOKEN_")


# Phases of a rank in its heartbeats.
RENDEZVOUS = "rendezvous"
STARTING = "starting"
LOADING = "loading data"
BUILDING = "building ops"
COMPILING = "compiling"
TRAINING = "training"
EVALUATING = "evaluating"
SAMPLING = "sampling"
SAVING = "saving"
ENDING = "ending"

PATIENT = frozenset({STARTING, LOADING, BUILDING, COMPILING, EVALUATING, SAMPLING, SAVING, ENDING})
"""Phases without heartbeats. In them, a rank is alive while it, or a rank for which it waits, is active."""
