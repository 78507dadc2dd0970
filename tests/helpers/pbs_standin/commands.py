"""PBS's commands qstat, qdel and pbsnodes."""

from __future__ import annotations

import sys
import time

from pbs_standin.formats import as_json, as_text, table
from pbs_standin.job import BY_QDEL
from pbs_standin.state import Home

SERVER, VERSION = "login", "23.06.06"
UNKNOWN_JOB, FINISHED = 153, 35


def qstat(home: Home, words: list[str]) -> int:
    flags = {letter for word in words if word.startswith("-") for letter in word[1:] if letter != "F"}
    is_json = "json" in " ".join(words).lower()
    asked = [word for word in words if not word.startswith("-") and word.lower() != "json"]
    jobs = home.jobs()
    for job in asked:
        if job not in jobs:
            return fail(f"qstat: Unknown Job Id {job}", UNKNOWN_JOB)
        if jobs[job]["job_state"] == "F" and "x" not in flags:
            return fail(f"qstat: {job} Job has finished, use -x or -H to obtain historical job information",
                        FINISHED)
    shown = {job: jobs[job] for job in asked or jobs if asked or "x" in flags or jobs[job]["job_state"] != "F"}
    if "f" in flags and is_json:
        print(as_json({**_head(), "Jobs": shown}))
    elif "f" in flags:
        print("".join(as_text(job, fields) for job, fields in shown.items()), end="")
    elif shown:
        print(table([(job, fields["Job_Name"], fields["Job_Owner"].partition("@")[0], "00:00:00",
                      fields["job_state"], fields["queue"]) for job, fields in shown.items()]), end="")
    return 0


def qdel(home: Home, words: list[str]) -> int:
    for job in words:
        with home.locked():
            fields = home.read(job)
            if fields is None:
                return fail(f"qdel: Unknown Job Id {job}", UNKNOWN_JOB)
            if fields["job_state"] == "R":
                home.file(job, "del").touch()
            elif fields["job_state"] == "Q":
                home.update(job, job_state="F", Exit_status=BY_QDEL)
    return 0


def pbsnodes(home: Home, words: list[str]) -> int:
    nodes = {}
    for name, size in home.nodes.items():
        used = sum(cpus for host, cpus in home.taken() if host == name)
        nodes[name] = {
            "Mom": name, "Port": 15002, "pbs_version": VERSION, "ntype": "PBS",
            "state": "job-busy" if used >= size else "free", "pcpus": size,
            "resources_available": {"arch": "linux", "host": name, "mem": "24684092kb", "ncpus": size,
                                    "vnode": name},
            "resources_assigned": {"ncpus": used} if used else {}, "resv_enable": "True",
            "sharing": "default_shared", "license": "l",
        }
    if "json" in " ".join(words).lower():
        print(as_json({**_head(), "nodes": nodes}))
        return 0
    for name, fields in nodes.items():
        print(name)
        for field, value in fields.items():
            inner = value.items() if isinstance(value, dict) else [("", value)]
            print("\n".join(f"     {field}{'.' if key else ''}{key} = {text}" for key, text in inner) or "")
        print()
    return 0


def _head() -> dict[str, object]:
    return {"timestamp": int(time.time()), "pbs_version": VERSION, "pbs_server": SERVER}


def fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
