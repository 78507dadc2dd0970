"""PBS's command qsub."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pbs_standin.commands import SERVER, UNKNOWN_JOB, fail
from pbs_standin.formats import clock, number_or_text, seconds_of
from pbs_standin.job import Job
from pbs_standin.state import Home, chunks_of

QUEUE = "workq"

_VALUED = "AaCcdeIjkJlmMNopPqrSuvW"


def qsub(home: Home, words: list[str]) -> int:
    options, rest = options_of(words)
    if any(name == "I" for name, _ in options) or len(rest) > 1:
        return fail("qsub: only scripts can be submitted here", 2)
    source = Path(rest[0]) if rest else None
    text = source.read_text() if source else sys.stdin.read()
    from_script = []
    for line in text.splitlines():
        if line.startswith("#PBS "):
            from_script += options_of(shlex.split(line[5:].split(" #")[0]))[0]
        elif line.strip() and not line.startswith("#"):
            break
    try:
        wanted = settled(from_script, options)
    except ValueError as error:
        return fail(f"qsub: {error}", 2)
    for job in re.findall(r"\d+[^:,]*", wanted.get("W", {}).get("depend", "")):
        if home.read(job) is None:
            return fail(f"qsub: Unknown Job Id {job}", UNKNOWN_JOB)
    with home.locked():
        number = home.next_number()
        ids = submit(home, number, wanted, source, words, text)
    for job_id in ids:
        if "[]" not in job_id:
            detached(lambda job_id=job_id: Job(home, job_id).run())
    print(ids[0])
    return 0


def options_of(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    options, rest = [], list(words)
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        word = rest.pop(0)
        name, value = word[1], word[2:]
        if name not in "hVXz" + _VALUED:
            sys.exit(fail(f"qsub: invalid option -- '{name}'", 2))
        options.append((name, value or rest.pop(0) if name in _VALUED and name != "I" else ""))
    return options, rest


def settled(from_script: list[tuple[str, str]], typed: list[tuple[str, str]]) -> dict:
    """Return options by letter; -l, -v and -W as dictionaries. The command line overrides the script."""
    wanted: dict = {"l": {}, "v": {}, "W": {}, "N": None, "j": "n", "q": QUEUE, "r": "y"}
    for name, value in [*from_script, *typed]:
        if name in "lvW":
            for pair in re.split(r",(?=[\w.]+=|\w+$)", value):
                key, equals, text = pair.partition("=")
                if not equals and name != "v":
                    raise ValueError(f"illegal -{name} value")
                wanted[name][key] = text if equals else os.environ.get(key, "")
        else:
            wanted[name] = value
    unknown = wanted["l"].keys() - {"select", "place", "walltime", "filesystems", "nodes"}
    if unknown:
        raise ValueError(f"Unknown resource: {', '.join(unknown)}")
    return wanted


def submit(home: Home, number: int, wanted: dict, source: Path | None, words: list[str], text: str) -> list[str]:
    user, host, here = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname(), os.getcwd()
    name = wanted["N"] or (source.name if source else "STDIN")
    select = wanted["l"].get("select", "1")
    chunks = chunks_of(select)
    resources = {"mpiprocs": sum(chunk["mpiprocs"] for chunk in chunks)} if "mpiprocs" in select else {}
    resources |= {"ncpus": sum(chunk["ncpus"] for chunk in chunks), "nodect": len(chunks),
                  "place": wanted["l"].get("place", "free"), "select": number_or_text(select)}
    if "walltime" in wanted["l"]:
        resources["walltime"] = clock(seconds_of(wanted["l"]["walltime"]))
    variables = {f"PBS_O_{name}": os.environ.get(name, "") for name in ("HOME", "LANG", "PATH", "SHELL")}
    variables |= {"PBS_O_WORKDIR": here, "PBS_O_SYSTEM": "Linux"} | (dict(os.environ) if "V" in wanted else {})
    variables |= wanted["v"] | {"PBS_O_QUEUE": wanted["q"], "PBS_O_HOST": host}
    now = time.ctime()
    first, last = (int(part) for part in wanted.get("J", "0-0").split("-"))
    indices = [f"[{index}]" for index in range(first, last + 1)] if "J" in wanted else [""]
    ids = []
    for index in (["[]", *indices] if "J" in wanted else indices):
        job_id = f"{number}{index}.{SERVER}"
        suffix = f"{number}.{index[1:-1]}" if len(index) > 2 else f"{number}"
        output = wanted.get("o", f"{here}/{name}.o{suffix}")
        if output.endswith("/"):
            output += f"{job_id}.OU"
        home.write(job_id, {
            "Job_Name": name, "Job_Owner": f"{user}@{host}", "job_state": "B" if index == "[]" else "Q",
            "queue": wanted["q"], "server": SERVER, "ctime": now, "Join_Path": wanted["j"],
            "Error_Path": f"{host}:{wanted.get('e', f'{here}/{name}.e{suffix}')}", "Keep_Files": "n",
            "Output_Path": f"{host}:{output}", "Priority": 0, "qtime": now,
            "Rerunable": "False" if wanted["r"] == "n" else "True", "Resource_List": resources, "substate": 10,
            "Variable_List": variables, **({"depend": wanted["W"]["depend"]} if "depend" in wanted["W"] else {}),
            "etime": now, "Submit_arguments": shlex.join(words), "project": "_pbs_project_default",
            **({"array_id": f"{number}[].{SERVER}", "array_index": int(index[1:-1])} if len(index) > 2 else {}),
            "Submit_Host": host,
        })
        home.file(job_id, "SC").write_text(text)
        ids.append(job_id)
    return ids


def detached(action: Callable[[], None]) -> None:
    if os.fork():
        return
    os.setsid()
    for descriptor in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    action()
    os._exit(0)
