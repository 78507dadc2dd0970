"""Client side of preflight: connect to rank 0, send facts, and run measurements on request."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from ezpz_llm.core.base import EXIT_PREFLIGHT, UserError, read_json
from ezpz_llm.core.base.records import as_plain, as_record
from ezpz_llm.core.rundir import RunDir, write_json
from ezpz_llm.launcher.basics.addresses import resolve
from ezpz_llm.launcher.basics.ranks import RankInfo
from ezpz_llm.verify.check.node_facts import gather_facts, route_to
from ezpz_llm.verify.check.preflight.endpoint import Endpoint, candidate_ports
from ezpz_llm.verify.check.preflight.measuring_process import MeasuringProcess
from ezpz_llm.verify.check.preflight.messages import (
    CLOCK,
    END,
    FACTS,
    Introduction,
    Reply,
    Request,
    authenticate,
    receive,
    send,
)
from ezpz_llm.verify.check.preflight.report import report_path
from ezpz_llm.verify.check.preflight.rules.gathered import NETWORK, Unreached

_CONNECT_TIMEOUT_S = 2.0
_REPORT_UNREACHED_AFTER_S = 8.0
_UNREACHED = "unreached-*.json"
_MAX_BYTES = 1 << 16


def connect(endpoint: Endpoint, info: RankInfo, folder: Path | None,
            should_stop: Callable[[], bool]) -> Connection | None:
    """Connect to rank 0, retrying until `should_stop()`. Return None if it was not reached.

    After 8 s without success, write the reason to a file in `folder`, one per node, so that rank 0 learns which
    nodes cannot reach it.
    """
    began, pause = time.monotonic(), 0.05
    is_reported = False
    while not should_stop():
        result = _try_ports(endpoint)
        if isinstance(result, Connection):
            return result
        if folder and not is_reported and time.monotonic() - began > _REPORT_UNREACHED_AFTER_S:
            is_reported = True
            _report_unreached(folder, endpoint, info, result)
        # Jitter: thousands of ranks that retry at the same moment would block each other.
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(1.0, pause * 1.5)
    return None


def _try_ports(endpoint: Endpoint) -> Connection | str:
    """Return a connection, or the reason why there is none."""
    first_reason = ""
    for port in candidate_ports(endpoint.port):
        try:
            peer = socket.create_connection((endpoint.address, port), timeout=_CONNECT_TIMEOUT_S)
        except TimeoutError:
            return "timed out"
        except ConnectionRefusedError:
            first_reason = first_reason or "refused"
            continue
        except OSError as error:
            return str(error.strerror or error)
        connection = authenticate(peer, endpoint.secret, port, serves=False)
        if connection is not None:
            return connection
        first_reason = first_reason or "answered by another program"
    return first_reason


def _report_unreached(folder: Path, endpoint: Endpoint, info: RankInfo, reason: str) -> None:
    host = socket.gethostname()
    path = folder / _UNREACHED.replace("*", re.sub(r"[^A-Za-z0-9_.-]", "_", host))
    with contextlib.suppress(OSError):
        if not path.exists():
            write_json(path, as_plain(Unreached(
                rank=info.rank, host=host, reason=reason, address=endpoint.address, port=endpoint.port,
                ranks_there=info.local_size, resolves_to=resolve(endpoint.address),
                interface=route_to(endpoint.address).interface)))


def unreached_files(folder: Path) -> list[Path]:
    """Return the files that nodes wrote because they could not reach rank 0."""
    return sorted(folder.glob(_UNREACHED))


def read_unreached(folder: Path) -> list[Unreached]:
    """Return the reports of nodes that could not reach rank 0."""
    reports = []
    for path in unreached_files(folder):
        # Skip damaged files and files of other programs.
        with contextlib.suppress(UserError):
            reports.append(as_record(Unreached, read_json(path, _MAX_BYTES), str(path)))
    return reports


def connect_and_serve(endpoint: Endpoint, info: RankInfo, env: Mapping[str, str], folder: Path | None,
                      should_stop: Callable[[], bool]) -> bool:
    """Connect to rank 0 (see `connect`) and reply to its requests. Return False if it was not reached."""
    while (connection := connect(endpoint, info, folder, should_stop)) is not None:
        if _serve_requests(connection, info, env):
            return True
    return False


def _serve_requests(connection: Connection, info: RankInfo, env: Mapping[str, str]) -> bool:
    """Reply to rank 0's requests until it ends preflight or disconnects.

    Return False if it disconnected before its first request, such as when its time limit for authentication expired
    just after the last message.
    """
    is_accepted = False
    send_lock, measuring = threading.Lock(), MeasuringProcess(env)

    def reply_to(request: Request) -> None:
        """Reply to a request from rank 0 with facts, the time, the network, or a measurement."""
        if request.stage == FACTS:
            reply = Reply(FACTS, facts=gather_facts(info, env))
        elif request.stage == CLOCK:
            reply = Reply(CLOCK, time=time.time())
        elif request.stage == NETWORK:
            reply = Reply(NETWORK, measuring.network())
        else:
            reply = measuring.measure(request)
        with send_lock, contextlib.suppress(OSError):
            send(connection, reply)

    def reply_in_thread(request: Request) -> None:
        """Reply in a new thread, since a stage may hang while rank 0 is already requesting the next."""
        threading.Thread(target=reply_to, args=(request,), daemon=True).start()

    try:
        send(connection, Introduction(info.rank, socket.gethostname()))
        while (request := receive(connection, Request)).stage != END:
            is_accepted = True
            reply_in_thread(request)
    except (EOFError, OSError, UserError):
        return is_accepted
    finally:
        measuring.close()
    return True


_GRACE_S = 5.0


def run_client(info: RankInfo, env: Mapping[str, str], run_dir: RunDir, rendezvous: Endpoint,
               limit_s: float) -> int:
    """Run preflight on a rank other than 0. Return exit code 0, since rank 0 reports the result.

    Raises:
        UserError: rank 0 could not be reached and wrote no report.
    """
    began, until = time.time(), time.monotonic() + limit_s + _GRACE_S
    path = report_path(run_dir)

    def should_stop() -> bool:
        """Return True once rank 0 has written its report, or after the time limit."""
        # Ignore a report of an earlier preflight in the same directory.
        has_report = path.exists() and path.stat().st_mtime > began - _GRACE_S
        return has_report or time.monotonic() > until

    if connect_and_serve(rendezvous, info, env, run_dir.path, should_stop) or time.monotonic() < until:
        return 0
    raise UserError(f"rank {info.rank} on {socket.gethostname()} waited {limit_s:.0f} s for rank 0 at MASTER_ADDR "
                    f"{rendezvous.address}:{rendezvous.port}, but it neither answered nor wrote a report",
                    where="rank 0's node, or the network to it",
                    instead="see logs/rank0000.log in the run directory", exit_code=EXIT_PREFLIGHT)
