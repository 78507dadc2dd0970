"""Flux: the instance that a batch script or a `flux alloc` shell runs in, as its broker describes it.

No Flux variable names the nodes ("Flux deliberately avoids setting many environment variables for the initial
program", flux-environment(7)), so `detect` queries the broker on this node for the instance's resources.
Sources, for flux-core 0.88: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html,
man1/flux-batch.html, man1/flux-run.html, man7/flux-shell-options.html. Resource sets follow RFC 20:
https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_20.html.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ezpz_llm.core.base import UserError, ask_command, count_noun, parse_json
from ezpz_llm.launcher.basics.hostlist import expand_hostlist, expand_numbers
from ezpz_llm.launcher.basics.hostnames import node_keys
from ezpz_llm.launcher.basics.log_kinds import NOT_STARTED, STEP_CANCELLED, TIME_LIMIT
from ezpz_llm.launcher.jobs.schedulers.scheduler import (
    Allocation,
    BatchScheduler,
    HostfileCommand,
    Node,
    Origin,
    Place,
    Request,
    StepLauncher,
)

_TIMEOUT_S, _TRIES = 5.0, 2
_STEP_TIMEOUT_S = 10.0
_RESOURCES = ("flux", "kvs", "get", "resource.R")
_NO_END = 0.0
_SHORT = {"-B": "--bank", "-N": "--nodes", "-q": "--queue", "-t": "--time-limit", "-x": "--exclusive"}
_BASE_58_DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class FluxScheduler(BatchScheduler):
    """Flux: `flux run` starts the ranks, in a job of the instance."""

    NAME = "flux"
    TITLE = "Flux"
    JOB_VARIABLE = "FLUX_ENCLOSING_ID"
    # A task of a job has FLUX_JOB_ID. An instance that another scheduler started has only FLUX_URI.
    ALIASES = ("FLUX_JOB_ID", "FLUX_URI")
    TRACES = ("FLUX_JOB_SIZE",)
    JOB_PREFIXES = ("FLUX_",)
    # It names the instance in which flux queues a job: the enclosing one, as for sbatch in a Slurm job.
    USER_VARIABLES = ("FLUX_URI",)
    COMMANDS = ("flux",)
    HOSTFILE_COMMANDS = tuple(HostfileCommand(name, f"flux hostlist --expand --delimiter=$'\\n' {source} > hosts",
                                              "flux")
                              for name, source in (("FLUX_JOB_ID", "local"), (JOB_VARIABLE, "instance"),
                                                   ("FLUX_URI", "instance")))
    KEEPS_NODE_ORDER = SITE_CORES_COUNT = True
    PATTERNS = (
        # launch itself also cancels a Flux job whose ranks do not stop.
        (TIME_LIMIT, r"job\.exception \S+ type=timeout severity=0 .*"),
        (STEP_CANCELLED, r"job\.exception \S+ type=cancel severity=0.*"),
        (NOT_STARTED, r"flux-shell\[\d+\]: FATAL: task (?P<ranks>\d+) \(host (?P<host>\S+?)\): start"
                      r" failed: .*"),
        (NOT_STARTED, r"job\.exception \S+ type=alloc severity=0 .*|^flux-run: ERROR: .*"),
    )
    PROGRAM, TEMPLATE, DIRECTIVE = "flux", "flux.sh", "#flux:"
    HINTS = ((r"bank|account", "--account"), (r"queue", "--queue"), (r"duration|time", "--time"),
             (r"unsatisfiable|nodes|resources", "--nodes"))

    def detect(self, env: Mapping[str, str]) -> Allocation | None:
        """Return the instance of this process: of a batch script, `flux alloc`, `flux start`, or `flux proxy`.

        Raises:
            UserError: this is a task of a job, which has no resources to start ranks on; the broker does not
                answer; or several brokers are on one node.
        """
        name = self.mark(env)
        if name is None:
            return None
        if task := env.get("FLUX_JOB_ID"):
            reason = ("this process is a task of the job, but launch needs a Flux instance: run launch in a script"
                      " of `flux batch` or a shell of `flux alloc`")
            raise self.unknown_nodes_error(task, reason, f"FLUX_JOB_ID={task}", env)
        where = f"{name}={env[name]}"
        answer = ask_command(_RESOURCES, env, _TIMEOUT_S, _TRIES)
        if answer.text is None:
            raise self.unknown_nodes_error(env[name], answer.complaint, where, env)
        try:
            hosts, ends_at = read_resources(answer.text)
        except UserError as error:
            raise self.unknown_nodes_error(env[name], error.found, where, env) from error
        return Allocation(scheduler=self.NAME, job_id=env[name], hosts=hosts, ends_at=ends_at,
                          source=shlex.join(_RESOURCES),
                          devices_from=Origin("Flux", Place.JOB) if any(host.devices for host in hosts) else None)

    def step_launcher(self) -> StepLauncher | None:
        """Return `flux run`. Each step is a job of the instance."""
        return StepLauncher("flux", self.TITLE)

    def own_step(self, env: Mapping[str, str]) -> str | None:
        """Return the id of the job that this process is a task of."""
        return env.get("FLUX_JOB_ID")

    def kill_steps(self, steps: Sequence[str]) -> None:
        """Send SIGKILL to all tasks of these jobs, and cancel them."""
        for step in steps:
            ask_command(("flux", "job", "kill", "--signal=KILL", step), os.environ, _STEP_TIMEOUT_S)
            ask_command(("flux", "cancel", step), os.environ, _STEP_TIMEOUT_S)

    def steps_are_over(self, steps: Sequence[str]) -> bool:
        """Return True if these jobs are inactive: their last task has ended, and their resources are free."""
        command = ("flux", "jobs", "--no-header", "--format={state}", *steps)
        answer = ask_command(command, os.environ, _STEP_TIMEOUT_S)
        states = (answer.text or "").split()
        return len(states) == len(steps) and set(states) == {"INACTIVE"}

    def time_limit(self, seconds: int) -> str:
        """Format a time limit in minutes or seconds, such as "90m"."""
        return f"{seconds // 60}m" if seconds % 60 == 0 else f"{seconds}s"

    def directives(self, request: Request) -> list[str]:
        """Return the directive lines of a job (RFC 36), without those of the site.

        Raises:
            UserError: a reservation, which Flux does not support; a name or folder that a directive cannot hold.
        """
        if request.reservation:
            raise UserError(f"Flux has no named reservations, but --reservation is {request.reservation}",
                            where="--reservation", instead="use --queue or --account, as your site specifies")
        for value in (request.name, str(request.output)):
            if not value.isprintable() or "{{" in value:
                raise UserError(f"Flux does not accept {value!r} as a job name or output path",
                                where="--name, --run-dir", instead="printable characters, without {{")
        options = [f"--job-name={shlex.quote(request.name)}", f"--nodes={request.nodes}", "--exclusive",
                   f"--time-limit={self.time_limit(request.time_s)}",
                   f"--output={shlex.quote(str(request.output) + '/job-{{id.dec}}.log')}"]
        options += [f"--{option}={value}"
                    for option, value in (("bank", request.account), ("queue", request.queue)) if value]
        return [f"{self.DIRECTIVE} {word}" for word in options]

    def subjects(self, line: str) -> set[str]:
        """Return the long form of the option."""
        word = re.split(r"[=\s]", line.removeprefix(self.DIRECTIVE).strip())[0]
        return {_SHORT.get(word, word)}

    def submission(self, script: str, after: str | None) -> list[str]:
        return [self.PROGRAM, "batch", *([f"--dependency=afterany:{after}"] if after else []), script]

    def job_id(self, line: str) -> str | None:
        """Return the id (F58) in a line that `flux batch` printed, or None."""
        return line if re.fullmatch(r"[ƒf][1-9A-HJ-NP-Za-km-z]+", line) else None

    def watch(self, ids: list[str]) -> str:
        return f"flux jobs {' '.join(ids)}"

    def cancel(self, ids: list[str]) -> str:
        return f"flux cancel {' '.join(ids)}"

    def output_file(self, request: Request, job: str) -> str:
        """Return the path of the job's output file, named by the decimal form of the id, which is ASCII."""
        number = 0
        for character in job[1:]:
            number = number * len(_BASE_58_DIGITS) + _BASE_58_DIGITS.index(character)
        return str(request.output / f"job-{number}.log")


def read_resources(text: str) -> tuple[tuple[Node, ...], float | None]:
    """Return the nodes in an RFC 20 resource set, by broker rank, and the instance's end time (None: no end).

    Raises:
        UserError: not a resource set, or one that names a node twice.
    """
    resources = parse_json(text, FluxScheduler.TITLE)
    execution = resources.get("execution") if isinstance(resources, dict) else None
    if not isinstance(execution, dict):
        raise UserError("its resources are not an RFC 20 resource set")
    names = expand_hostlist(",".join(map(str, execution.get("nodelist") or ())))
    ranks = [(rank, entry["children"]) for entry in execution.get("R_lite") or () for rank in _ids(entry["rank"])]
    ranks.sort(key=lambda rank_and_children: rank_and_children[0])
    if not names or len(names) != len(ranks):
        raise UserError(f"its resources have {count_noun(len(ranks), 'broker')} on "
                        f"{count_noun(len(names), 'node')}")
    if len(set(node_keys(names))) < len(names):
        raise UserError(f"several of its brokers are on one node: {', '.join(names[:4])}")
    # `cores` is left unset: Flux numbers physical cores, and ranks may be bound to hardware threads.
    hosts = tuple(Node(name, devices=len(_ids(children.get("gpu", ""))) or None)
                  for name, (_, children) in zip(names, ranks, strict=True))
    ends_at = execution.get("expiration")
    return hosts, float(ends_at) if isinstance(ends_at, int | float) and ends_at > _NO_END else None


def _ids(text: Any) -> tuple[int, ...]:
    try:
        return expand_numbers(text.strip("[]")) if text else ()
    except (ValueError, AttributeError) as error:
        raise UserError(f"its resources have {text!r} where a set of numbers is expected") from error
