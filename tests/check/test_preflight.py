"""Preflight's judgements on facts made by hand: what is named, how badly, and what is not named."""

from __future__ import annotations

import copy
import random
import time

import pytest
from slowness import scaled

from ezpz_llm.check.coordinator import link_groups, node_groups, ring_rounds
from ezpz_llm.check.facts import family, read_network
from ezpz_llm.check.judge import Finding, Gathered, judge
from ezpz_llm.check.judge.gathered import format_rate, host_ranges
from ezpz_llm.check.judge.network import link_rates, outliers
from ezpz_llm.check.report import Report, as_text, split_common

GIB = 2**30


def rank_facts(rank: int, per_host: int = 2, hosts: int = 4) -> dict:
    """What a rank of a healthy reservation tells: hosts n1, n2, …, each rank with its own GPU and four cores."""
    node, local = divmod(rank, per_host)
    return {
        "rank": rank, "world_size": per_host * hosts, "local_rank": local, "local_size": per_host,
        "node_rank": node, "rank_source": "Hydra (PMI_RANK)", "rank_notes": [],
        "host": f"n{node + 1}", "boot_id": f"boot-{node}", "pid": 1000 + rank,
        "cores": list(range(4 * local, 4 * local + 4)), "host_cores": list(range(4 * per_host)),
        "memory": {"total": 64 * GIB, "free": 60 * GIB},
        "shm": {"path": "/dev/shm", "total": 32 * GIB, "free": 32 * GIB},
        "tmp": {"path": "/tmp", "total": 100 * GIB, "free": 90 * GIB},
        "interfaces": {"lo": ["127.0.0.1"], "hsn0": [f"10.0.0.{node + 1}"]}, "named_interfaces": {},
        "name_resolves_to": f"10.0.0.{node + 1}",
        "master": {"address": "n1", "port": "29500", "resolves_to": "10.0.0.1"},
        "route": {"interface": "hsn0", "address": f"10.0.0.{node + 1}"},
        "environment": {"NCCL_NET": "AWS Libfabric", "LD_LIBRARY_PATH": "/opt/a:/opt/b"}, "masks": {},
        "devices": {"ids": ["0", "1"], "source": "/proc/driver/nvidia/gpus", "installed": 2},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "ezpz_llm": "0.1.0",
                     "kernel": "5.14.21", "NVIDIA driver": "550.54"},
        "clock": [0.001, 0.0005],
        "stages": {
            "ready": {"device": {"kind": "cuda", "identity": f"GPU-{rank}", "name": "A100", "free": 39 * GIB,
                                 "total": 40 * GIB}, "import_s": 3.0, "torch": "2.13.0"},
            "compute": {"flops_per_second": 200e12}, "reduce node": {"bytes_per_second": 150e9},
            "reduce link 0": {"bytes_per_second": 20e9}, "reduce link 1": {"bytes_per_second": 20e9},
            "network": {"library": "NCCL", "network": "AWS Libfabric", "provider": "cxi"},
            "mpi": {"rank": rank, "size": per_host * hosts, "library": "MPICH Version: 5.0.2"},
        },
    }


def healthy(**more) -> dict:
    """The arguments of Gathered for four hosts with two ranks each."""
    return {"world_size": 8, "facts": [rank_facts(rank) for rank in range(8)], "network": "AWS Libfabric",
            "hosts": [f"n{1 + rank // 2}" for rank in range(8)], **more}


def changed(change, ranks=range(8), **more) -> list[Finding]:
    """The findings after `change(facts)` on some ranks."""
    case = healthy(**more)
    for rank in ranks:
        change(case["facts"][rank])
    return judge(Gathered(**case))


def setting(path: str, value):
    """A change that sets a member such as "stages.compute.flops_per_second"."""
    def change(facts: dict) -> None:
        *folders, name = path.split("|")
        for folder in folders:
            facts = facts[folder]
        facts[name] = value
    return change


def without(path: str):
    def change(facts: dict) -> None:
        *folders, name = path.split("|")
        for folder in folders:
            facts = facts[folder]
        facts.pop(name, None)
    return change


def both(*changes):
    def change(facts: dict) -> None:
        for one in changes:
            one(facts)
    return change


def test_a_healthy_reservation_has_no_finding() -> None:
    assert judge(Gathered(**healthy())) == []
    assert judge(Gathered(1, [{**rank_facts(0, 1, 1), "stages": {}}])) == []


N3 = (4, 5)
CPU = setting("stages|ready|device", {"kind": "cpu", "identity": None})
CASES = {
    # what is changed on which ranks, the level, and the words that the only finding has to hold
    "a rank in another world": (setting("world_size", 1), [3], "bad",
                                ["rank 3 in a world of 1, rank 0 in one of 8"]),
    "torch of one host": (setting("stages|ready|torch", "2.11.0"), N3, "bad",
                          ["torch differs: n3: 2.11.0, all others 2.13.0"]),
    "no deepspeed on one host": (without("versions|deepspeed"), N3, "bad",
                                 ["deepspeed differs: n3: none, all others 0.19.8"]),
    "python's third number": (setting("versions|python", "3.11.2"), N3, "warn", ["python differs: n3: 3.11.2"]),
    "python's second number": (setting("versions|python", "3.10.2"), N3, "bad", ["python differs: n3: 3.10.2"]),
    "kernels half and half": (setting("versions|kernel", "6.1"), [0, 1, 2, 3], "warn",
                              ["n[1-2]: 6.1", "n[3-4]: 5.14.21"]),
    "the driver of one host": (setting("versions|NVIDIA driver", "535.1"), N3, "warn",
                               ["NVIDIA driver", "n3: 535.1"]),
    "one rank's own version": (setting("versions|deepspeed", "0.15.1"), [5], "bad", ["rank 5 on n3: 0.15.1"]),
    "MPI library of one host": (setting("stages|mpi|library", "Open MPI v5.0.11"), N3, "warn",
                                ["MPI library differs: n3: Open MPI v5.0.11"]),
    "a variable of one host": (setting("environment|NCCL_CROSS_NIC", "1"), N3, "warn",
                               ["NCCL_CROSS_NIC differs: n3: 1, all others unset"]),
    "a folder is missing": (setting("environment|LD_LIBRARY_PATH", "/opt/a"), N3, "warn",
                            ["LD_LIBRARY_PATH differs: n3: lacks /opt/b"]),
    "a folder too many": (setting("environment|LD_LIBRARY_PATH", "/opt/a:/opt/b:/opt/c"), [0, 1, 4, 5, 6, 7][2:4],
                          "warn", ["n3: more: /opt/c"]),
    "two ranks on one device": (setting("stages|ready|device|identity", "GPU-X"), N3, "bad",
                                ["on n3 local ranks 0-1 share one device (GPU-X)"]),
    "devices equal everywhere": (lambda one: setting("stages|ready|device|identity", "GPU-" + one["host"])(one),
                                 range(8), "bad", ["on n[1-4] local ranks 0-1", "GPU-n1 and likewise elsewhere"]),
    "a device in use": (setting("stages|ready|device|free", 10 * GIB), [5], "warn",
                        ["rank 5 on n3 has only 10.0 GiB of 40.0 GiB free"]),
    "another kind of GPU": (setting("stages|ready|device|name", "V100"), N3, "warn", ["n3: V100, all others A100"]),
    "torch without the GPUs": (CPU, range(8), "bad", ["torch computes on the CPU on n[1-4]", "2 devices"]),
    "ranks crowd on one core": (setting("cores", [0]), N3, "bad",
                                ["on n3 2 ranks run on 1 core (0), while cores 1-7 have none"]),
    "ranks share some cores": (setting("cores", [0, 1, 2, 3]), N3, "warn",
                               ["ranks 4-5 share cores, while cores 4-7 have no rank"]),
    "little memory": (setting("memory|free", GIB), N3, "warn", ["n3: only 1.0 GiB of memory for 2 ranks free"]),
    "Docker's /dev/shm": (setting("shm|free", 2**26), range(8), "warn", ["n[1-4]: only 64.0 MiB of /dev/shm free"]),
    "a full /tmp": (setting("tmp|free", 1000), N3, "warn", ["n3: only 1000 B of /tmp free"]),
    "a wrong clock": (setting("clock", [-65.0, 0.001]), N3[:1], "warn", ["the clock of n3 is 65.0 s behind"]),
    "an interface is missing": (both(setting("named_interfaces", {"NCCL_SOCKET_IFNAME": "hsn"}),
                                     setting("interfaces", {"lo": ["127.0.0.1"], "eth0": ["10.0.0.3"]})), N3, "bad",
                                ["n3: no interface hsn (NCCL_SOCKET_IFNAME=hsn)"]),
    "nobody has the interface": (setting("named_interfaces", {"GLOO_SOCKET_IFNAME": "ib0"}), range(8), "bad",
                                 ["no host has interface ib0"]),
    "the host's name is a loopback": (setting("name_resolves_to", "127.0.1.1"), N3, "warn",
                                      ["on n3 the host's own name is a loopback"]),
    "MASTER_ADDR of another host": (setting("master|resolves_to", "10.0.0.9"), [0], "bad",
                                    ["MASTER_ADDR n1 (10.0.0.9) is no address of rank 0's host n1"]),
    "one boot id": (setting("boot_id", "boot-2"), [6, 7], "warn", ["n[3-4] have one boot id"]),
    "TCP where there is Slingshot": (setting("stages|network|network", "Socket"), range(8), "bad",
                                     ["NCCL chose 'Socket' on n[1-4]", "this site has 'AWS Libfabric'", "TCP"]),
    "oneCCL on TCP": (setting("stages|network", {"library": "oneCCL", "network": "tcp;ofi_rxm"}), range(8), "bad",
                      ["oneCCL chose 'tcp;ofi_rxm'"]),
    "MPI counts otherwise": (both(setting("stages|mpi|size", 1), setting("stages|mpi|rank", 0)), range(1, 8),
                             "warn", ["counts 1 rank where the environment counts 8 (ranks 1-7)"]),
    "MPI does not start": (setting("stages|mpi", {"error": "ImportError: libmpi.so"}), [2], "warn",
                           ["MPI cannot be started by rank 2: ImportError: libmpi.so"]),
    "MPI hangs": (both(setting("stuck_in", "mpi"), without("stages|mpi")), range(8), "warn",
                  ["MPI cannot be started by ranks 0-7: it hangs"]),
    "torch does not load": (setting("stages", {"ready": {"error": "OSError: libcudart.so"}}), N3, "bad",
                            ["ranks 4-5 on n3 failed in importing torch", "libcudart.so"]),
    "a slow host": (setting("stages|compute|flops_per_second", 70e12), N3, "warn",
                    ["n3 is slow: 2.9 times slower", "70 TFLOP/s, median 200 TFLOP/s"]),
    "a very slow host": (setting("stages|compute|flops_per_second", 20e12), N3, "bad", ["n3 is slow: 10.0 times"]),
    "a slow device": (setting("stages|compute|flops_per_second", 70e12), [5], "warn", ["rank 5 on n3 is slow"]),
    "slow links between devices": (setting("stages|reduce node|bytes_per_second", 10e9), N3, "bad",
                                   ["all-reduces among the ranks of n3 are 15.0 times slower"]),
    "a rank was lost": (setting("lost_in", "reduce link 0"), [5], "bad",
                        ["rank 5 on n3 ended during an all-reduce with a rank of another host"]),
    "a rank hangs": (both(setting("stuck_in", "ready"), setting("stages", {})), [5], "bad",
                     ["rank 5 on n3 did not come back from importing torch"]),
    "torch is slow everywhere": (both(setting("stuck_in", "ready"), setting("stages", {})), range(6), "warn",
                                 ["torch is still being imported by 6 of 8 ranks"]),
    "two sources of ranks": (setting("rank_notes", ["srun says rank 0 of 4"]), range(8), "warn",
                             ["ranks 0-7: srun says rank 0 of 4"]),
}


@pytest.mark.parametrize("name", list(CASES))
def test_one_fault_makes_one_finding(name: str) -> None:
    change, ranks, level, words = CASES[name]
    findings = changed(change, ranks)
    assert [finding.level for finding in findings] == [level], findings
    for word in words:
        assert word in findings[0].found, findings[0]
    assert findings[0].instead


def _gloo(host: str, interface: str):
    return {"bytes_per_second": 1e9, "interfaces": [interface]}


def test_the_interface_that_gloo_really_used() -> None:
    case = healthy(network=None)
    for facts in case["facts"]:
        facts["stages"] = {"reduce link 0": _gloo(facts["host"], "eth1" if facts["host"] == "n3" else "hsn0")}
        facts["named_interfaces"] = {"GLOO_SOCKET_IFNAME": "hsn0"}
    findings = judge(Gathered(**case))
    assert [finding.found for finding in findings] == [
        "the hosts talk over different interfaces: n3: eth1, all others hsn0",
        "n3 talks over eth1, though GLOO_SOCKET_IFNAME is hsn0"]


def test_masks_tell_devices_apart_where_torch_does_not() -> None:
    """One visible device for two ranks is shared; two visible ones are dealt out by local rank."""
    mask = {"ids": ["3"], "source": "CUDA_VISIBLE_DEVICES", "installed": 0}
    found = changed(both(CPU, setting("devices", mask)), network=None)
    assert [(one.level, one.topic) for one in found] == [("warn", "devices"), ("warn", "devices")]
    assert "local ranks 0-1 share one device (CUDA_VISIBLE_DEVICES 3)" in found[0].found
    two = {"ids": ["2", "3"], "source": "CUDA_VISIBLE_DEVICES", "installed": 0}
    assert not any("share" in one.found for one in changed(both(CPU, setting("devices", two))))


def test_ranks_that_are_missing_are_named_with_their_hosts() -> None:
    case = healthy(waited_s=24.0)
    case["facts"] = [facts for facts in case["facts"] if facts["rank"] not in (2, 6, 7)]
    found = [finding.found for finding in judge(Gathered(**case)) if finding.topic == "missing"]
    assert found == ["rank 2 on n2 did not report within 24 s", "ranks 6-7 on n4 did not report within 24 s"]
    unknown = judge(Gathered(**{**case, "hosts": []}))
    assert "ranks 2,6-7 did not report within 24 s" in [finding.found for finding in unknown]


def test_many_missing_hosts_make_one_finding() -> None:
    facts = [rank_facts(0, 1, 1000)]
    findings = judge(Gathered(1000, facts, [f"nid{number:06d}" for number in range(1, 1001)], waited_s=24.0))
    assert len(findings) == 1
    assert "ranks 1-999 on nid[000002-001000]" in findings[0].found


def unreached(host: str, rank: int, reason: str = "timed out", **more) -> dict:
    return {"host": host, "rank": rank, "reason": reason, "address": "n1", "port": 29500, "ranks_there": 2,
            "resolves_to": "10.0.0.1", "interface": "eth0", **more}


def test_hosts_that_cannot_reach_rank_0() -> None:
    case = healthy(unreached=[unreached("n3", 4), unreached("n4", 6),
                              unreached("n2", 2, "refused", resolves_to="127.0.1.1")])
    case["facts"] = case["facts"][:2]
    for hosts in (case["hosts"], []):
        found = [finding.found for finding in judge(Gathered(**{**case, "hosts": hosts}))]
        assert found == ["n[3-4] cannot reach MASTER_ADDR n1:29500 by eth0: timed out",
                         "n2 cannot reach MASTER_ADDR n1:29500, which is 127.0.1.1 there, the host itself: refused"]


def test_a_host_that_was_only_slow_to_reach_rank_0_is_not_named() -> None:
    assert judge(Gathered(**healthy(unreached=[unreached("n3", 4)]))) == []


def test_duplicated_ranks_name_both_places() -> None:
    case = healthy()
    case["facts"][3] = {**copy.deepcopy(case["facts"][3]), "rank": 1}
    found = [finding.found for finding in judge(Gathered(**case))]
    assert found[0].startswith("2 processes say that they are rank 1: n1 (pid 1001, Hydra (PMI_RANK)), n2 (pid")
    assert any("rank 3 on n2 did not report" in text for text in found)


def test_a_taken_port_and_a_rank_that_cannot_read_its_host() -> None:
    case = healthy(port_error="Address already in use")
    case["facts"][5] = {"rank": 5, "host": "n3", "stages": {}}
    found = [finding.found for finding in judge(Gathered(**case))]
    assert found == ["rank 5 on n3 came up, but could not read the host's facts in time",
                     "MASTER_PORT 29500 cannot be bound on rank 0's host: Address already in use"]


def link_case(rates: dict[tuple[str, str], float]) -> Gathered:
    """Rates of the links of a ring of hosts with one rank each, by pair; None for one that failed."""
    names = list(dict.fromkeys(name for pair in rates for name in pair))
    facts = [{**rank_facts(rank, 1, len(names)), "stages": {}} for rank in range(len(names))]
    for turn, pairs in enumerate(ring_rounds(len(names))):
        for one, other in pairs:
            rate = rates.get((names[one], names[other]), rates.get((names[other], names[one])))
            answer = {"error": "timed out"} if rate is None else {"bytes_per_second": rate}
            facts[one]["stages"][f"reduce link {turn}"] = facts[other]["stages"][f"reduce link {turn}"] = answer
    return Gathered(len(names), facts)


@pytest.mark.parametrize("count", [4, 5, 8])
def test_the_host_with_the_slow_link_and_not_its_neighbours(count: int) -> None:
    names = [f"n{number}" for number in range(1, count + 1)]
    ring = {(one, names[(place + 1) % count]): 1e9 for place, one in enumerate(names)}
    slow = {pair: 2e6 if "n3" in pair else rate for pair, rate in ring.items()}
    gathered = link_case(slow)
    assert [name for name, rate in link_rates(gathered).items() if rate < 1e7] == ["n3"]
    findings = judge(gathered)
    assert [(finding.level, finding.topic) for finding in findings] == [("bad", "links")]
    assert "the link of n3 is slow: all-reduces with its neighbours are 500.0 times slower" in findings[0].found
    broken = judge(link_case({pair: None if "n3" in pair else rate for pair, rate in ring.items()}))
    assert [finding.found for finding in broken] == ["all-reduces between n3 and its neighbours fail: timed out"]


def test_one_slow_link_between_two_good_hosts_names_neither() -> None:
    """Each has another link that is fast: the fault is between them, and not theirs to be left out for."""
    assert judge(link_case({("n1", "n2"): 1e9, ("n2", "n3"): 1e6, ("n3", "n4"): 1e9, ("n4", "n1"): 1e9})) == []


def test_noise_names_nobody() -> None:
    """On a loaded machine rates spread by factors: nobody is called slow for it, or hardly ever."""
    numbers = random.Random(0)
    named = 0
    for _ in range(1000):
        rates = {rank: 1e9 * numbers.uniform(0.5, 1.0) for rank in range(8)}
        named += bool(outliers(rates))
    assert named < 10
    assert outliers({0: 1.0}) == outliers({}) == outliers({0: 100.0, 1: 1.0}) == {}
    assert outliers({rank: 1e9 for rank in range(7)} | {7: 4e8}).keys() == {7}
    assert outliers({rank: 1e9 * numbers.uniform(0.5, 1.0) for rank in range(7)} | {7: 2e6}).keys() == {7}
    assert outliers({0: 1e9, 1: 1e9, 2: 0.0}).keys() == {2}


def test_rings_measure_every_host_with_both_neighbours() -> None:
    assert ring_rounds(0) == ring_rounds(1) == []
    assert ring_rounds(2) == [[(0, 1)]]
    for count in (3, 4, 7, 10):
        rounds = ring_rounds(count)
        edges = [frozenset(edge) for turn in rounds for edge in turn]
        assert sorted(map(sorted, edges)) == sorted(sorted((i, (i + 1) % count)) for i in range(count))
        for turn in rounds:
            hosts = [host for edge in turn for host in edge]
            assert len(hosts) == len(set(hosts))


def test_groups_follow_hosts_of_different_sizes() -> None:
    places = [(0, "a"), (1, "b"), (2, "a"), (3, "b"), (4, "b"), (5, "c")]
    assert node_groups(places) == [(0, 2), (1, 3, 4)]
    assert link_groups(places) == [[(0, 1), (2, 3)], [(1, 5)], [(5, 0)]]


def test_ten_thousand_ranks_are_judged_and_folded_in_seconds() -> None:
    began = time.process_time()
    case = {"world_size": 10_000, "facts": [rank_facts(rank, 4, 2500) for rank in range(10_000)]}
    for facts in case["facts"]:
        facts["stages"]["mpi"]["size"] = 10_000
        if facts["host"] in ("n700", "n701"):
            facts["versions"]["deepspeed"] = "0.15"
    report = Report(Gathered(**case), judge(Gathered(**case)), 1.0)
    text = as_text(report)
    assert "deepspeed differs: n[700-701]: 0.15, all others 0.19.8" in text
    assert len(text.splitlines()) < 45
    assert "… 2476 more" in text
    assert time.process_time() - began < scaled(20)


def test_the_report_leads_with_the_worst_and_says_what_to_do() -> None:
    findings = changed(both(setting("shm|free", 0), setting("stages|ready|torch", "2.11.0")), N3)
    text = as_text(Report(Gathered(**healthy()), findings, 12.34))
    assert text.index("bad   versions: torch differs") < text.index("warn  room: n3")
    assert text.count("      do: ") == 2
    assert text.splitlines()[-1] == ("preflight: unfit: 1 thing to mend, 1 warning (8 of 8 ranks on 4 "
                                     "hosts in 12.3 s)")
    assert "versions  python 3.11.7" in text


def test_the_file_holds_common_facts_once() -> None:
    common, own = split_common([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1}])
    assert common == {"a": 1}
    assert own == [{"b": 1}, {"b": 2}, {}]
    common, own = split_common([{"a": 1}, {"a": 1}, {"a": 1}, {}])
    assert (common, own[3]) == ({"a": 1}, {"a": None})


@pytest.mark.parametrize(("names", "text"), [
    (["n1"], "n1"), (["n1", "n2", "n3", "n7"], "n[1-3,7]"), (["n08", "n09", "n10"], "n[08-10]"),
    (["x1c0s1b0n0", "x1c0s1b0n1"], "x1c0s1b0n[0-1]"), (["login", "n1"], "login,n1"),
    (["a1.x", "a2.x"], "a[1-2].x"), ([f"{letter}1" for letter in "abcdefgh"], "a1,b1,c1,d1,e1,f1 and 2 more"),
])
def test_hosts_in_few_words(names: list[str], text: str) -> None:
    assert host_ranges(names) == text


@pytest.mark.parametrize(("value", "text"), [
    (999.7e6, "1 GB/s"), (2.06e6, "2.06 MB/s"), (0, "0 B/s"), (3.5e15, "3.5 PB/s")])
def test_rates(value: float, text: str) -> None:
    assert format_rate(value, "B/s") == text


# Lines as public logs of NCCL 2.12 to 2.27, of its OFI plug-in and of oneCCL 2021.15 have them; not captured by us.
_LOGS = {
    "Socket": (["host:7:7 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.",
                "host:7:7 [0] NCCL INFO NET/IB : No device found.",
                "host:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>",
                "host:7:7 [0] NCCL INFO Assigned NET plugin Socket to comm",
                "host:7:7 [0] NCCL INFO Using network Socket"],
               {"library": "NCCL", "network": "Socket", "interface": "eth0"}, "tcp"),
    "Slingshot": (["nid1:5:9 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)",
                   "nid1:5:9 [0] NCCL INFO Using network AWS Libfabric"],
                  {"library": "NCCL", "network": "AWS Libfabric", "provider": "cxi"}, "libfabric"),
    "InfiniBand": (["h:7:19 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
                    "h:7:19 [0] NCCL INFO Using network IB"],
                   {"library": "NCCL", "network": "IB", "interface": "mlx5_0"}, "ib"),
    "oneCCL": (["2025:11:26-12:43:48:(401) |CCL_INFO| provider: tcp",
                "2025:11:26-12:43:48:(401) |CCL_INFO|   nic: { name tcp:br-1894, state unknown, speed 1.25 GB/s }",
                "2025:11:26-12:43:48:(401) |CCL_INFO| CCL_ATL_TRANSPORT: ofi"],
               {"library": "oneCCL", "network": "tcp", "transport": "ofi", "provider": "tcp",
                "interface": "br-1894"}, "tcp"),
    "oneCCL over MPI": (["2025:11:26-12:43:48:(4016676) |CCL_INFO| CCL_ATL_TRANSPORT: mpi"],
                        {"library": "oneCCL", "network": "mpi", "transport": "mpi"}, "mpi"),
}


@pytest.mark.parametrize("name", _LOGS)
def test_the_network_that_a_library_says_it_chose(name: str) -> None:
    lines, found, kind = _LOGS[name]
    assert read_network(["torch is imported", *lines]) == found
    assert family(found["network"]) == kind
    assert read_network(["provider: the user's own print"]) == {}


def test_oneccl_over_mpi_is_not_judged() -> None:
    told = {"library": "oneCCL", "network": "mpi", "transport": "mpi"}
    assert changed(setting("stages|network", told), network="ofi") == []
