"""Names of the variables that launch gives to every rank, of the phases that ranks report, and what begins a live
line."""

from __future__ import annotations

RUN_ID_VARIABLE = "EZPZ_LLM_RUN_ID"
"""The run's marker: unique for each launch, and how its processes are found."""

WORLD_SIZE_VARIABLE = "EZPZ_LLM_WORLD_SIZE"
"""The number of ranks that launch starts."""

ENDS_AT_VARIABLE = "EZPZ_LLM_ENDS_AT"
"""When the reservation ends, in epoch seconds; unset where it is not known."""

PLACES_VARIABLE = "EZPZ_LLM_PLACES"
"""Told to a command's check alone: hosts and ranks a host in Slurm's short forms, "n[1-2] 4(x2)"."""

SITE_VARIABLE = "EZPZ_LLM_SITE"
"""The site in use: a name, or the path of its file."""

BIND_VARIABLE = "EZPZ_LLM_BIND"
"""Cores of each rank of a host ("0-3:4-7"), which the shim keeps to where the launcher has no option for them."""

TEE_VARIABLE = "EZPZ_LLM_TEE"
"""Whose output reaches the console (launch's --tee): "0", "all" or "none"."""

TERMINAL_VARIABLE = "EZPZ_LLM_TERMINAL"
"""Columns of the terminal that rank 0's output reaches, with IN_COLOUR behind them where it may have colours; empty
or unset where it reaches none."""

IN_COLOUR = "+colour"

LIVE_LINE = "\x1b[2K\x1b[1K\x1b[2K"
"""Begins a line of ours that is written anew until something else is printed and ends with a carriage return; it is
in no log. It clears the terminal's line three times, so that no other program's line begins so by accident."""

LOG_BYTES_VARIABLE = "EZPZ_LLM_LOG_BYTES"
"""Of a rank's output, how much its log takes: the user's own."""

FAILURE_TEXTS_VARIABLE = "EZPZ_LLM_FAILURE_TEXTS"
"""Files of a site with texts of failures, joined by colons: the user's or the site's own."""

RANK_VARIABLE = "EZPZ_LLM_RANK"
"""The rank that a process belongs to: set by the shim for its rank's process, inherited by all its children."""

NODE_DIR_VARIABLE = "EZPZ_LLM_NODE_DIR"
"""The run's node-local folder (see node/folder.py)."""

HEARTBEAT_VARIABLE = "EZPZ_LLM_HEARTBEAT"
"""The file that the rank beats into, node-local."""

STACKS_VARIABLE = "EZPZ_LLM_STACKS"
"""The node-local file into which the rank writes its stacks when it is sent STACKS_SIGNAL."""

RANK_SOURCE_VARIABLE = "EZPZ_LLM_RANK_SOURCE"
"""Which launcher's variables told the shim its rank: `RankInfo.source`."""

RANKS_PER_NODE_VARIABLE = "EZPZ_LLM_RANKS_PER_NODE"
"""Ranks of each node as launch planned them, in Slurm's short form ("4(x2),1"): no launcher tells a rank its node
where nodes have unequal numbers of ranks."""

RANK_NAMES_VARIABLE = "EZPZ_LLM_RANK_NAMES"
"""The variables by which launchers of other packages number ranks, as JSON; unset without such packages."""

RANKS_OWN = (RANK_VARIABLE, RANK_SOURCE_VARIABLE, NODE_DIR_VARIABLE, HEARTBEAT_VARIABLE, STACKS_VARIABLE)
"""What the shim tells one rank alone. A launch inside a rank starts a run of its own, and hands none of it on."""

TORCHELASTIC_VARIABLE = "TORCHELASTIC_RUN_ID"
"""What torchrun, and nothing else, gives its ranks."""

TORCHS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "NODE_RANK", "GROUP_RANK",
              "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", TORCHELASTIC_VARIABLE,
              "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
              "TORCHELASTIC_ERROR_FILE")
"""What tells one rank alone of its place, in the names that torch reads: by torchrun, by the shim or by hand."""

OUTER_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL", "PALS_RANKID", "PALS_LOCAL_", "PALS_NODEID",
                   "SLURM_PROCID", "SLURM_LOCALID", "FLUX_TASK_", "JSM_NAMESPACE_")
"""How the names begin by which srun or mpiexec tells a torchrun that it has started its place. Its ranks would
inherit them, and an MPI in them would take all ranks of a host for the same one."""

EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
"""Where torch compiles extensions in a run."""

STACKS_SIGNAL = 58
"""What asks a rank for its stacks: a real-time signal, which no scheduler, MPI or collective library sends."""

FORWARDED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME")
"""What a run needs of the environment: for ranks on other hosts where a launcher passes nothing by itself, and for
a job. Names that begin as these do belong to it as well:"""
FORWARDED_PREFIXES = ("PYTHON", "EZPZ_LLM_", "NCCL_", "RCCL_", "CCL_", "FI_", "UCX_", "GLOO_", "TORCH_", "DS_",
                      "OMP_", "CUDA_", "HSA_", "ZE_", "SYCL_", "HF_", "TIKTOKEN_")


# What a rank can be doing, as heartbeats name it.
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
"""Phases in which a rank may go without a heartbeat for as long as it, or one that it waits for, is at work."""
