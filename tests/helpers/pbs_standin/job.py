"""Process of a job: wait for other jobs and for nodes, run the script over ssh, and end it at its walltime."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import subprocess
import sys
import time
from pathlib import Path

from pbs_standin.formats import seconds_of
from pbs_standin.state import Home, place

KILL_DELAY_S = 10
BY_QDEL, BY_WALLTIME = 271, -29
"""Exit_status of a job that was ended by qdel or its walltime."""


class Job:
    def __init__(self, home: Home, job_id: str) -> None:
        self.home, self.job_id = home, job_id
        self.node_file = home.path / "aux" / job_id

    def run(self) -> None:
        while not self._depends_well():
            time.sleep(0.1)
        while (chunks := self._start()) is None:
            time.sleep(0.1)
            if self._fields()["job_state"] != "Q":
                return
        code = self._run_script(chunks[0])
        self.node_file.unlink(missing_ok=True)
        with self.home.locked():
            self.home.update(self.job_id, job_state="F", substate=92, Exit_status=code)
            array = self._fields().get("array_id")
            if array and all(job["job_state"] == "F" for job in self.home.jobs().values()
                             if job.get("array_id") == array):
                self.home.update(array, job_state="F", substate=92, Exit_status=0)

    def _fields(self) -> dict:
        return self.home.read(self.job_id) or {}

    def _depends_well(self) -> bool:
        kind, _, others = self._fields().get("depend", "").partition(":")
        states = [self.home.read(other) or {} for other in others.split(":") if other]
        if kind == "afterok" and any(state.get("Exit_status", 0) for state in states):
            self.home.update(self.job_id, job_state="F", comment="Job deleted as result of dependency")
            sys.exit(0)
        return all(state.get("job_state") == "F" for state in states)

    def _start(self) -> list[tuple[str, int, dict]] | None:
        with self.home.locked():
            fields = self._fields()
            if fields["job_state"] != "Q":
                return None
            resources = fields["Resource_List"]
            chunks = place(self.home, str(resources["select"]), resources["place"])
            if chunks is None:
                return None
            vnodes = "+".join(f"({host}:ncpus={chunk['ncpus']})" for host, _, chunk in chunks)
            hosts = "+".join(f"{host}/{slot}" + (f"*{chunk['ncpus']}" if chunk["ncpus"] > 1 else "")
                             for host, slot, chunk in chunks)
            when = time.strftime("%a %b %d at %H:%M")
            self.node_file.write_text("".join(f"{host}\n" * chunk["mpiprocs"] for host, _, chunk in chunks))
            self.home.update(self.job_id, job_state="R", substate=42, exec_host=hosts, exec_vnode=vnodes,
                             stime=time.ctime(), mtime=time.ctime(), run_count=fields.get("run_count", 0) + 1,
                             comment=f"Job run at {when} on {vnodes}")
            return chunks

    def _environment(self, chunk: dict) -> dict[str, str]:
        fields = self._fields()
        user = pwd.getpwuid(os.getuid())
        array = {"PBS_ARRAY_ID": fields["array_id"], "PBS_ARRAY_INDEX": str(fields["array_index"])} \
            if "array_id" in fields else {}
        return {
            **fields["Variable_List"], **array, "ENVIRONMENT": "BATCH",
            "HOME": user.pw_dir, "LOGNAME": user.pw_name,
            "NCPUS": str(chunk["ncpus"]), "OMP_NUM_THREADS": str(chunk["ompthreads"]),
            "PATH": f"{self.home.path / 'bin'}:/usr/bin:/bin", "PBS_ENVIRONMENT": "PBS_BATCH",
            "PBS_JOBCOOKIE": "0" * 32, "PBS_JOBDIR": user.pw_dir, "PBS_JOBID": self.job_id,
            "PBS_JOBNAME": fields["Job_Name"], "PBS_MOMPORT": "15003", "PBS_NODEFILE": str(self.node_file),
            "PBS_NODENUM": "0", "PBS_QUEUE": fields["queue"], "PBS_TASKNUM": "1", "SHELL": "/bin/bash",
            "TMPDIR": "/var/tmp", "USER": user.pw_name,
        }

    def _run_script(self, first: tuple[str, int, dict]) -> int:
        """Run the script on its first node, to its end or to its walltime."""
        host, _, chunk = first
        fields = self._fields()
        output = fields["Output_Path"].partition(":")[2]
        error = output if "o" in fields["Join_Path"] else fields["Error_Path"].partition(":")[2]
        pid_file = self.home.file(self.job_id, "pid")
        variables = [f"{name}={value}" for name, value in self._environment(chunk).items()]
        inner = f"echo $$ > {shlex.quote(str(pid_file))}; cd; exec \"$@\""
        words = ["setsid", "--wait", "sh", "-c", inner, "sh", "env", "-i", *variables, "/bin/bash",
                 str(self.home.file(self.job_id, "SC"))]
        limit = seconds_of(fields["Resource_List"].get("walltime", "0"))
        started, killed = time.monotonic(), 0
        with open(output, "ab") as out, open(error, "ab") as err:
            script = subprocess.Popen(["ssh", host, shlex.join(words)], stdin=subprocess.DEVNULL, stdout=out,
                                      stderr=err)
            while script.poll() is None:
                time.sleep(0.1)
                used = int(time.monotonic() - started)
                if not killed and self.home.file(self.job_id, "del").exists():
                    killed = BY_QDEL
                elif not killed and limit and used > limit:
                    killed = BY_WALLTIME
                    err.write(f"=>> PBS: job killed: walltime {used} exceeded limit {limit}\n".encode())
                    err.flush()
                else:
                    continue
                self._end(host, pid_file, script)
        return killed or script.returncode

    def _end(self, host: str, pid_file: Path, script: subprocess.Popen[bytes]) -> None:
        # As observed: SIGTERM to the script's processes, 1 s later to the script, SIGKILL after the site's delay.
        session = pid_file.read_text().strip()
        children = f"for p in $(pgrep -s {session}); do [ $p = {session} ] || kill -TERM $p; done"
        for delay, command in ((1, children), (KILL_DELAY_S, f"kill -TERM {session}"),
                               (0, f"pkill -KILL -s {session}")):
            subprocess.run(["ssh", host, command], stdin=subprocess.DEVNULL, capture_output=True, check=False)
            with contextlib.suppress(subprocess.TimeoutExpired):
                script.wait(delay)
