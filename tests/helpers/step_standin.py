"""Stand-ins for `srun`, `flux`, `jsrun` and `blaunch`, for tests.

They accept the documented options that launch uses, reject all others, and start ranks on this machine with the
documented variables. They follow the manual pages of flux-core 0.88 and IBM's; no output was captured on a
production machine.

`python3 step_standin.py PROGRAM WORDS…` runs one; `make` creates a folder with programs of these names.
"""

from __future__ import annotations

import getopt
import json
import os
import subprocess
import sys
from pathlib import Path

_FLUX_RUN = ["nodes=", "tasks-per-node=", "ntasks=", "exclusive", "requires=", "input="]
_FLUX_SHELL = ("cpu-affinity", "gpu-affinity", "exit-timeout")
_JSRUN = ["nrs=", "rs_per_host=", "tasks_per_rs=", "cpu_per_rs=", "gpu_per_rs=", "launch_distribution=", "bind="]

_SRUN = ["ntasks-per-node=", "distribution=", "cpu-bind=", "overcommit", "overlap", "export=", "wait=",
         "kill-on-bad-exit=", "input=", "nodelist=", "container-image=", "container-mounts=", "container-workdir=",
         "container-env="]


def make(folder: Path, *programs: str, resources: str = "") -> Path:
    """Create a folder of stand-ins. Each appends its arguments to folder/calls.

    `resources` is the output of `flux kvs get resource.R`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resources").write_text(resources)
    for name in programs:
        program = folder / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >> {folder}/calls\n'
                           f'FLUX_STANDIN={folder} exec {sys.executable} {__file__} {name} "$@"\n')
        program.chmod(0o755)
    return folder


def resources(nodelist: str, ranks: str, gpus: str = "", expiration: float = 0.0) -> str:
    """Return a resource set (Flux RFC 20) of nodes with four cores."""
    children = {"core": "0-3"} | ({"gpu": gpus} if gpus else {})
    return json.dumps({"version": 1, "execution": {
        "R_lite": [{"rank": ranks, "children": children}], "starttime": 0.0, "expiration": expiration,
        "nodelist": [nodelist]}})


def _options(words: list[str], short: str, long: list[str]) -> tuple[dict[str, str], list[str]]:
    try:
        options, command = getopt.getopt(words, short, long)
    except getopt.GetoptError as error:
        sys.exit(f"unrecognized: {error.msg}")
    return dict(options), command


def _start(command: list[str], envs: list[dict[str, str]]) -> int:
    ranks = [subprocess.Popen(command, env=os.environ | env) for env in envs]
    return max(rank.wait() for rank in ranks)


def flux(words: list[str]) -> int:
    """Emulate `kvs get`, `hostlist`, `jobs`, `batch`, and `run`."""
    folder = Path(os.environ["FLUX_STANDIN"])
    resource_set = (folder / "resources").read_text()
    if words[:2] == ["kvs", "get"]:
        print(resource_set)
        return 0 if resource_set else 1
    if words[0] == "hostlist":
        print("h1\nh2")
        return 0
    if words[0] == "batch":
        print("ƒ2WxYz")
        return 0
    if words[0] != "run":
        return 1
    own = words[:words.index("--input=0")]
    shell = [own[place + 1] for place, word in enumerate(own) if word == "-o"]
    assert all(option.partition("=")[0] in _FLUX_SHELL for option in shell), shell
    options, command = _options(words[1:], "o:", _FLUX_RUN)
    nodes = int(options["--nodes"])
    ranks = int(options.get("--ntasks", 0)) or nodes * int(options["--tasks-per-node"])
    each = -(-ranks // nodes)
    return _start(command, [{"FLUX_JOB_ID": "ƒ9", "FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": str(ranks),
                             "FLUX_TASK_LOCAL_ID": str(rank % each), "FLUX_JOB_NNODES": str(nodes)}
                            for rank in range(ranks)])


def jsrun(words: list[str]) -> int:
    """Run all tasks of all resource sets."""
    options, command = _options(words, "", _JSRUN)
    each = int(options["--tasks_per_rs"])
    ranks = int(options["--nrs"]) * each
    return _start(command, [{"JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_SIZE": str(ranks),
                             "JSM_NAMESPACE_LOCAL_RANK": str(rank % each), "JSM_NAMESPACE_LOCAL_SIZE": str(each)}
                            for rank in range(ranks)])


def srun(words: list[str]) -> int:
    """Run all tasks of one step. With --container-image (Pyxis), the image is in their variable INSIDE."""
    if words == ["--help"]:
        print("--container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
        return 0
    options, command = _options(words, "N:n:c:", _SRUN)
    ranks, nodes = int(options["-n"]), int(options["-N"])
    each = int(options.get("--ntasks-per-node", ranks))
    return _start(command, [{"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % each),
                             "SLURM_NODEID": str(rank // each), "SLURM_STEP_NUM_TASKS": str(ranks),
                             "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})", "SLURM_JOB_ID": "7",
                             "INSIDE": options.get("--container-image", "")}
                            for rank in range(ranks)])


def blaunch(words: list[str]) -> int:
    """Run HOST COMMAND… through a shell, as ssh does."""
    return subprocess.call(["sh", "-c", " ".join(words[1:])])


if __name__ == "__main__":
    sys.exit({"srun": srun, "flux": flux, "jsrun": jsrun, "blaunch": blaunch}[sys.argv[1]](sys.argv[2:]))
