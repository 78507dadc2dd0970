"""Another user of the node attacks the ports of a preflight and a run, without effect.

Each attack is tried a few times; 100 times each with `-m slow`.
"""

from __future__ import annotations

import re
import sys

import pytest
from slowness import scaled
from strangers import Strangers

CALM = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_ESCAPE = re.compile("[\x00-\x08\x0b-\x1f\x80-\x9f]")

# Attacks each port of MASTER_PORT's range on which user argv[1] listens, with all attacks in argv[3] at once, until
# it is killed. Occupies the ports named in that user's records (below argv[4]) first. Writes the ports that it
# found to argv[2].
ATTACK = r"""
import collections, glob, json, socket, sys, threading, time

victim, log, kinds, home = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(), sys.argv[4]
EVIL = "\x1b]0;PWNED\x07\x1b[31mevil"
tries, seen = collections.Counter(), set()

def ports():
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].rpartition(":")
            port = int(port, 16)
            if words[3] == "0A" and int(words[7]) == victim and 20000 <= port < 32010:
                yield port

def frame(message):
    body = json.dumps(message).encode()
    return len(body).to_bytes(4, "big") + body

def attack(kind, port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as peer:
            peer.settimeout(5)
            if kind == "deep":
                peer.sendall(b"[" * 100_000 + b"\n")
            elif kind == "norank":
                peer.sendall(frame({"host": EVIL}))
            elif kind == "impostor":
                peer.sendall(frame({"rank": 1, "host": EVIL}))
            elif kind == "unfinished":
                for _ in range(500):
                    peer.sendall(b"x" * 100_000)
            elif kind == "idle":
                time.sleep(3)
            elif kind == "slow":
                for _ in range(5):
                    peer.sendall(b"\0")
                    time.sleep(1)
            elif kind == "echo":
                while data := peer.recv(4096):
                    peer.sendall(data)
    except OSError:
        pass

def squat():
    taken = {}
    while True:
        for path in glob.glob(f"{home}/**/run.json", recursive=True):
            try:
                port = int(json.load(open(path))["launch"]["env"]["MASTER_PORT"])
                if port not in taken:
                    taken[port] = None
                    taken[port] = socket.create_server(("127.0.0.1", port))
                    threading.Thread(target=serve, args=(taken[port],), daemon=True).start()
            except (OSError, ValueError, KeyError):
                pass
        time.sleep(0.005)

def serve(listener):
    number = 0
    while True:
        peer, number = listener.accept()[0], number + 1
        threading.Thread(target=hold, args=(peer, number), daemon=True).start()

def hold(peer, number):
    try:
        if number % 3 == 0:
            # Pass the rank's messages on to rank 0, which then listens on the next port.
            with socket.create_connection(("127.0.0.1", peer.getsockname()[1] + 1), timeout=2) as rank_0:
                threading.Thread(target=pump, args=(rank_0, peer), daemon=True).start()
                pump(peer, rank_0)
        while number % 3:
            peer.sendall(b"\0" if number % 3 == 1 else peer.recv(4096))
            time.sleep(0.1)
    except OSError:
        pass

def pump(source, target):
    try:
        while data := source.recv(4096):
            target.sendall(data)
    except OSError:
        pass

def keep_on(kind):
    while True:
        for port in list(seen):
            tries[kind] += 1
            attack(kind, port)
        time.sleep(0.01)

threading.Thread(target=squat, daemon=True).start()
for kind in kinds:
    for _ in range(20 if kind == "idle" else 1):
        threading.Thread(target=keep_on, args=(kind,), daemon=True).start()
while True:
    now = set(ports())
    seen |= now
    seen &= now
    if now:
        with open(log, "a") as file:
            print(sorted(now), dict(tries), file=file)
    time.sleep(0.05)
"""
KINDS = "deep norank impostor unfinished idle slow echo"


def attacked(strangers: Strangers, *words: str) -> tuple[str, bool]:
    """Run the victim's `launch WORDS`, which must succeed. Return its output, and True if a port was attacked."""
    victim, attacker = strangers.victim, strangers.attacker
    log = attacker.home / "log"
    attacker.run("rm", "-f", log)
    attacking = attacker.start(sys.executable, "-c", ATTACK, str(victim.uid), log, KINDS, victim.home)
    try:
        done = victim.launch(*words, timeout=150, **CALM)
    finally:
        attacker.end_all()
        _, said = attacking.communicate(timeout=scaled(120))
    text = done.stdout + done.stderr
    assert done.returncode == 0, f"{text}\n{said}"
    assert "Traceback" not in said, said
    assert not _ESCAPE.search(text), ascii(text)
    assert "PWNED" not in text
    return text, log.exists()


def preflight(strangers: Strangers) -> tuple[str, bool]:
    return attacked(strangers, "--preflight", "-n", "2", "hostname")


def training(strangers: Strangers) -> tuple[str, bool]:
    return attacked(strangers, "-n", "2", sys.executable, "-m", "ezpz_llm.test_dist", "--steps", "20")


def is_fit(text: str) -> bool:
    return "preflight: fit" in text and "2 of 2 ranks" in text


def test_a_preflight_among_strangers(strangers: Strangers) -> None:
    text, met = preflight(strangers)
    assert met
    assert is_fit(text), text


@pytest.mark.full
def test_ranks_of_one_node_listen_at_no_port_of_theirs(strangers: Strangers) -> None:
    text, met = training(strangers)
    assert not met, f"something listens where ranks meet\n{text}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_preflights_among_strangers(strangers: Strangers) -> None:
    for turn in range(100):
        text, met = preflight(strangers)
        assert met, turn
        assert is_fit(text), f"{turn}: {text}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_runs_among_strangers(strangers: Strangers) -> None:
    for turn in range(100):
        text, met = training(strangers)
        assert not met, f"{turn}: something listens where ranks meet\n{text}"
