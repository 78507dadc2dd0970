"""Tests of preflight's findings on synthetic facts."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from slowness import scaled

from ezpz_llm.core.base.records import as_record
from ezpz_llm.core.rundir.records import Finding
from ezpz_llm.verify.check.facts import ConnectedRank, Facts
from ezpz_llm.verify.check.preflight.coordinator import link_groups, node_groups, ring_rounds
from ezpz_llm.verify.check.preflight.report import Report, as_text, split_common_members
from ezpz_llm.verify.check.preflight.rules import Gathered, apply_rules
from ezpz_llm.verify.check.preflight.rules.gathered import Unreached, format_rate, node_ranges
from ezpz_llm.verify.check.preflight.rules.network import link_rates, outliers

GIB = 2**30


def reduction(rate: float, *interfaces: str) -> dict:
    return {"type": "reduction", "bytes_per_second": rate, "interfaces": list(interfaces)}


def failed(error: str) -> dict:
    return {"type": "failed", "error": error}


def gathered(world_size: int, facts: list[dict], hosts: Sequence[str] = (), **more) -> Gathered:
    """Return what rank 0 gathers if ranks send these facts."""
    ranks = [as_record(Facts if "cores" in of_rank else ConnectedRank, of_rank, "a message") for of_rank in facts]
    return Gathered(world_size, ranks, hosts, **more)


def rank_facts(rank: int, per_host: int = 2, hosts: int = 4) -> dict:
    """Return the facts of a healthy rank with its own GPU and four cores, on nodes n1, n2, …"""
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
            "ready": {"type": "ready", "torch": "2.13.0",
                      "device": {"kind": "cuda", "identity": f"GPU-{rank}", "name": "A100", "free": 39 * GIB,
                                 "total": 40 * GIB}},
            "compute": {"type": "compute", "flops_per_second": 200e12}, "reduce node": reduction(150e9),
            "reduce link 0": reduction(20e9), "reduce link 1": reduction(20e9),
            "network": {"type": "network", "library": "NCCL", "network": "AWS Libfabric", "provider": "cxi"},
            "mpi": {"type": "mpi", "rank": rank, "size": per_host * hosts, "library": "MPICH Version: 5.0.2"},
        },
    }


def healthy(**more) -> dict:
    """Return the arguments of Gathered for four nodes with two ranks each."""
    return {"world_size": 8, "facts": [rank_facts(rank) for rank in range(8)], "network": "AWS Libfabric",
            "hosts": [f"n{1 + rank // 2}" for rank in range(8)], **more}


def changed(change, ranks=range(8), **more) -> list[Finding]:
    """Return the findings after `change(facts)` on some ranks."""
    case = healthy(**more)
    for rank in ranks:
        change(case["facts"][rank])
    return apply_rules(gathered(**case))


def setting(path: str, value):
    """Return a change that sets a value such as "stages|compute|flops_per_second"."""
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
        for single_change in changes:
            single_change(facts)
    return change


def test_a_healthy_reservation_has_no_finding() -> None:
    assert apply_rules(gathered(**healthy())) == []
    assert apply_rules(gathered(1, [{**rank_facts(0, 1, 1), "stages": {}}])) == []


N3 = (4, 5)
CPU = setting("stages|ready|device", {"kind": "cpu", "identity": None})
CASES = {
    # change, ranks, expected level, and words in the only finding
    "another world size on a rank": (setting("world_size", 1), [3], "bad",
                                     ["world size is 1 on rank 3, but 8 on rank 0"]),
    "another torch on a node": (setting("stages|ready|torch", "2.11.0"), N3, "bad",
                                ["torch differs: n3: 2.11.0, all others 2.13.0"]),
    "no deepspeed on a node": (without("versions|deepspeed"), N3, "bad",
                               ["deepspeed differs: n3: none, all others 0.19.8"]),
    "another patch of python": (setting("versions|python", "3.11.2"), N3, "warn", ["python differs: n3: 3.11.2"]),
    "another minor python": (setting("versions|python", "3.10.2"), N3, "bad", ["python differs: n3: 3.10.2"]),
    "two kernels on two nodes each": (setting("versions|kernel", "6.1"), [0, 1, 2, 3], "warn",
                                      ["n[1-2]: 6.1", "n[3-4]: 5.14.21"]),
    "another driver on a node": (setting("versions|NVIDIA driver", "535.1"), N3, "warn",
                                 ["NVIDIA driver", "n3: 535.1"]),
    "another version on one rank": (setting("versions|deepspeed", "0.15.1"), [5], "bad", ["rank 5 on n3: 0.15.1"]),
    "another MPI library on a node": (setting("stages|mpi|library", "Open MPI v5.0.11"), N3, "warn",
                                      ["MPI library differs: n3: Open MPI v5.0.11"]),
    "a variable on one node": (setting("environment|NCCL_CROSS_NIC", "1"), N3, "warn",
                               ["NCCL_CROSS_NIC differs: n3: 1, all others unset"]),
    "a folder missing in a path": (setting("environment|LD_LIBRARY_PATH", "/opt/a"), N3, "warn",
                                   ["LD_LIBRARY_PATH differs: n3: lacks /opt/b"]),
    "another folder in a path": (setting("environment|LD_LIBRARY_PATH", "/opt/a:/opt/b:/opt/c"), N3,
                                 "warn", ["n3: adds /opt/c"]),
    "two ranks on one device": (setting("stages|ready|device|identity", "GPU-X"), N3, "bad",
                                ["on n3 local ranks 0-1 share one device (GPU-X)"]),
    "shared devices on all nodes": (lambda facts: setting("stages|ready|device|identity",
                                                          "GPU-" + facts["host"])(facts),
                                    range(8), "bad", ["on n[1-4] local ranks 0-1", "GPU-n1 and more elsewhere"]),
    "a device in use": (setting("stages|ready|device|free", 10 * GIB), [5], "warn",
                        ["rank 5 on n3 has only 10.0 GiB of 40.0 GiB free"]),
    "another kind of GPU": (setting("stages|ready|device|name", "V100"), N3, "warn", ["n3: V100, all others A100"]),
    "torch without GPU support": (CPU, range(8), "bad", ["torch uses the CPU on n[1-4]", "2 devices"]),
    "two ranks on one core": (setting("cores", [0]), N3, "bad",
                              ["on n3 2 ranks run on 1 core (0), while cores 1-7 are idle"]),
    "ranks share some cores": (setting("cores", [0, 1, 2, 3]), N3, "warn",
                               ["ranks 4-5 share cores, while cores 4-7 are idle"]),
    "little memory": (setting("memory|free", GIB), N3, "warn", ["n3: only 1.0 GiB of memory for 2 ranks free"]),
    "Docker's /dev/shm": (setting("shm|free", 2**26), range(8), "warn", ["n[1-4]: only 64.0 MiB of /dev/shm free"]),
    "a full /tmp": (setting("tmp|free", 1000), N3, "warn", ["n3: only 1000 B of /tmp free"]),
    "a wrong clock": (setting("clock", [-65.0, 0.001]), N3[:1], "warn", ["the clock of n3 is 65.0 s behind"]),
    "no interface on a node": (both(setting("named_interfaces", {"NCCL_SOCKET_IFNAME": "hsn"}),
                                    setting("interfaces", {"lo": ["127.0.0.1"], "eth0": ["10.0.0.3"]})), N3, "bad",
                               ["n3: no interface hsn (NCCL_SOCKET_IFNAME=hsn)"]),
    "no interface on any node": (setting("named_interfaces", {"GLOO_SOCKET_IFNAME": "ib0"}), range(8), "bad",
                                 ["no node has interface ib0"]),
    "the hostname is a loopback address": (setting("name_resolves_to", "127.0.1.1"), N3, "warn",
                                           ["on n3 the hostname resolves to a loopback"]),
    "MASTER_ADDR of another node": (setting("master|resolves_to", "10.0.0.9"), [0], "bad",
                                    ["MASTER_ADDR n1 (10.0.0.9) is not an address of rank 0's node n1"]),
    "the same boot id": (setting("boot_id", "boot-2"), [6, 7], "warn", ["n[3-4] have the same boot id"]),
    "TCP where there is Slingshot": (setting("stages|network|network", "Socket"), range(8), "bad",
                                     ["NCCL chose 'Socket' on n[1-4]", "of this site is 'AWS Libfabric'", "TCP"]),
    "oneCCL on TCP": (setting("stages|network", {"type": "network", "library": "oneCCL",
                                                 "network": "tcp;ofi_rxm"}), range(8), "bad",
                      ["oneCCL chose 'tcp;ofi_rxm'"]),
    "another world size in MPI": (both(setting("stages|mpi|size", 1), setting("stages|mpi|rank", 0)), range(1, 8),
                                  "warn", ["has 1 rank, but the environment has 8 (ranks 1-7)"]),
    "MPI does not start": (setting("stages|mpi", failed("ImportError: libmpi.so")), [2], "warn",
                           ["rank 2 cannot start MPI: ImportError: libmpi.so"]),
    "MPI hangs": (both(setting("stuck_in", "mpi"), without("stages|mpi")), range(8), "warn",
                  ["ranks 0-7 cannot start MPI: it hangs"]),
    "torch does not load": (setting("stages", {"ready": failed("OSError: libcudart.so")}), N3, "bad",
                            ["ranks 4-5 on n3 failed in importing torch", "libcudart.so"]),
    "a slow node": (setting("stages|compute|flops_per_second", 70e12), N3, "warn",
                    ["n3 is slow: 2.9 times slower", "70 TFLOP/s, median 200 TFLOP/s"]),
    "a very slow node": (setting("stages|compute|flops_per_second", 20e12), N3, "bad", ["n3 is slow: 10.0 times"]),
    "a slow device": (setting("stages|compute|flops_per_second", 70e12), [5], "warn", ["rank 5 on n3 is slow"]),
    "slow links between devices": (setting("stages|reduce node|bytes_per_second", 10e9), N3, "bad",
                                   ["all-reduces among the ranks of n3 are 15.0 times slower"]),
    "a rank was lost": (setting("lost_in", "reduce link 0"), [5], "bad",
                        ["rank 5 on n3 ended during an all-reduce with a rank of another node"]),
    "a rank hangs": (both(setting("stuck_in", "ready"), setting("stages", {})), [5], "bad",
                     ["rank 5 on n3 did not finish importing torch"]),
    "torch is slow everywhere": (both(setting("stuck_in", "ready"), setting("stages", {})), range(6), "warn",
                                 ["6 of 8 ranks are still importing torch"]),
    "two sources of ranks": (setting("rank_notes", ["srun says rank 0 of 4"]), range(8), "warn",
                             ["ranks 0-7: srun says rank 0 of 4"]),
}


@pytest.mark.parametrize("name", list(CASES))
def test_each_fault_makes_one_finding(name: str) -> None:
    change, ranks, level, words = CASES[name]
    findings = changed(change, ranks)
    assert [finding.level for finding in findings] == [level], findings
    for word in words:
        assert word in findings[0].found, findings[0]
    assert findings[0].instead


def test_a_node_without_torch_is_told_what_to_install() -> None:
    findings = changed(setting("stages", {"ready": failed("ModuleNotFoundError: No module named 'torch'")}), N3)
    assert [finding.topic for finding in findings] == ["torch"]
    assert "ezpz_llm[train]" in findings[0].instead


def test_the_interface_that_gloo_used_is_compared() -> None:
    case = healthy(network=None)
    for facts in case["facts"]:
        facts["stages"] = {"reduce link 0": reduction(1e9, "eth1" if facts["host"] == "n3" else "hsn0")}
        facts["named_interfaces"] = {"GLOO_SOCKET_IFNAME": "hsn0"}
    findings = apply_rules(gathered(**case))
    assert [finding.found for finding in findings] == [
        "nodes use different interfaces: n3: eth1, all others hsn0",
        "n3 uses eth1, although GLOO_SOCKET_IFNAME is hsn0"]


def test_masks_identify_devices_without_identity_from_torch() -> None:
    """A single visible device is shared; of two, each local rank has one."""
    mask = {"ids": ["3"], "source": "CUDA_VISIBLE_DEVICES", "installed": 0}
    findings = changed(both(CPU, setting("devices", mask)), network=None)
    assert [(finding.level, finding.topic) for finding in findings] == [("warn", "devices"), ("warn", "devices")]
    assert "local ranks 0-1 share one device (CUDA_VISIBLE_DEVICES 3)" in findings[0].found
    two = {"ids": ["2", "3"], "source": "CUDA_VISIBLE_DEVICES", "installed": 0}
    assert not any("share" in finding.found for finding in changed(both(CPU, setting("devices", two))))


def test_missing_ranks_are_reported_with_their_nodes() -> None:
    case = healthy(waited_s=24.0)
    case["facts"] = [facts for facts in case["facts"] if facts["rank"] not in (2, 6, 7)]
    texts = [finding.found for finding in apply_rules(gathered(**case)) if finding.topic == "missing"]
    assert texts == ["rank 2 on n2 did not report within 24 s", "ranks 6-7 on n4 did not report within 24 s"]
    unknown = apply_rules(gathered(**{**case, "hosts": []}))
    assert "ranks 2,6-7 did not report within 24 s" in [finding.found for finding in unknown]


def test_many_missing_nodes_make_one_finding() -> None:
    facts = [rank_facts(0, 1, 1000)]
    findings = apply_rules(gathered(1000, facts, [f"nid{number:06d}" for number in range(1, 1001)], waited_s=24.0))
    assert len(findings) == 1
    assert "ranks 1-999 on nid[000002-001000]" in findings[0].found


def unreached(host: str, rank: int, reason: str = "timed out", resolves_to: str = "10.0.0.1") -> Unreached:
    return Unreached(rank, host, reason, "n1", 29500, ranks_there=2, resolves_to=resolves_to, interface="eth0")


def test_nodes_that_cannot_reach_rank_0() -> None:
    case = healthy(unreached=[unreached("n3", 4), unreached("n4", 6),
                              unreached("n2", 2, "refused", resolves_to="127.0.1.1")])
    case["facts"] = case["facts"][:2]
    for hosts in (case["hosts"], []):
        texts = [finding.found for finding in apply_rules(gathered(**{**case, "hosts": hosts}))]
        assert texts == ["n[3-4] cannot reach MASTER_ADDR n1:29500 over eth0: timed out",
                         "n2 cannot reach MASTER_ADDR n1:29500, which resolves to the loopback address 127.0.1.1 "
                         "there: refused"]


def test_a_node_that_reached_rank_0_late_is_not_reported() -> None:
    assert apply_rules(gathered(**healthy(unreached=[unreached("n3", 4)]))) == []


def test_duplicate_ranks_are_reported_with_both_processes() -> None:
    case = healthy()
    case["facts"][3] = {**copy.deepcopy(case["facts"][3]), "rank": 1}
    texts = [finding.found for finding in apply_rules(gathered(**case))]
    assert texts[0].startswith("2 processes have rank 1: n1 (pid 1001, Hydra (PMI_RANK)), n2 (pid")
    assert any("rank 3 on n2 did not report" in text for text in texts)


def test_a_port_in_use_and_a_rank_without_facts() -> None:
    case = healthy(port_error="Address already in use")
    case["facts"][5] = {"rank": 5, "host": "n3", "stages": {}}
    texts = [finding.found for finding in apply_rules(gathered(**case))]
    assert texts == ["rank 5 on n3 started, but sent no facts in time",
                     "MASTER_PORT 29500 cannot be bound on rank 0's node: Address already in use"]


def link_case(rates: dict[tuple[str, str], float]) -> Gathered:
    """Return a case with these rates by pair of nodes in a ring, one rank per node; None for a failed link."""
    names = list(dict.fromkeys(name for pair in rates for name in pair))
    facts = [{**rank_facts(rank, 1, len(names)), "stages": {}} for rank in range(len(names))]
    for turn, pairs in enumerate(ring_rounds(len(names))):
        for left, right in pairs:
            rate = rates.get((names[left], names[right]), rates.get((names[right], names[left])))
            answer = failed("timed out") if rate is None else reduction(rate)
            facts[left]["stages"][f"reduce link {turn}"] = facts[right]["stages"][f"reduce link {turn}"] = answer
    return gathered(len(names), facts)


@pytest.mark.parametrize("count", [4, 5, 8])
def test_the_node_with_the_slow_link_is_reported_but_not_its_neighbors(count: int) -> None:
    names = [f"n{number}" for number in range(1, count + 1)]
    ring = {(name, names[(index + 1) % count]): 1e9 for index, name in enumerate(names)}
    slow = {pair: 2e6 if "n3" in pair else rate for pair, rate in ring.items()}
    case = link_case(slow)
    assert [name for name, rate in link_rates(case).items() if rate < 1e7] == ["n3"]
    findings = apply_rules(case)
    assert [(finding.level, finding.topic) for finding in findings] == [("bad", "links")]
    assert "the link of n3 is slow: all-reduces with its neighbors are 500.0 times slower" in findings[0].found
    broken = apply_rules(link_case({pair: None if "n3" in pair else rate for pair, rate in ring.items()}))
    assert [finding.found for finding in broken] == ["all-reduces between n3 and its neighbors fail: timed out"]


def test_a_slow_link_between_two_good_nodes_is_not_reported() -> None:
    """Each node has another fast link, so excluding one of them would be wrong."""
    slow_link = {("n1", "n2"): 1e9, ("n2", "n3"): 1e6, ("n3", "n4"): 1e9, ("n4", "n1"): 1e9}
    assert apply_rules(link_case(slow_link)) == []


def test_noise_gives_no_outliers() -> None:
    """Rates that vary by a factor of 2, as on a loaded machine, give outliers in less than 1 % of cases."""
    numbers = random.Random(0)
    cases_with_outliers = 0
    for _ in range(1000):
        rates = {rank: 1e9 * numbers.uniform(0.5, 1.0) for rank in range(8)}
        cases_with_outliers += bool(outliers(rates))
    assert cases_with_outliers < 10
    assert outliers({0: 1.0}) == outliers({}) == outliers({0: 100.0, 1: 1.0}) == {}
    assert outliers({rank: 1e9 for rank in range(7)} | {7: 4e8}).keys() == {7}
    assert outliers({rank: 1e9 * numbers.uniform(0.5, 1.0) for rank in range(7)} | {7: 2e6}).keys() == {7}
    assert outliers({0: 1e9, 1: 1e9, 2: 0.0}).keys() == {2}


def test_rings_measure_every_node_with_both_neighbors() -> None:
    assert ring_rounds(0) == ring_rounds(1) == []
    assert ring_rounds(2) == [[(0, 1)]]
    for count in (3, 4, 7, 10):
        rounds = ring_rounds(count)
        edges = [frozenset(edge) for turn in rounds for edge in turn]
        assert sorted(map(sorted, edges)) == sorted(sorted((i, (i + 1) % count)) for i in range(count))
        for turn in rounds:
            hosts = [host for edge in turn for host in edge]
            assert len(hosts) == len(set(hosts))


def test_groups_of_nodes_with_different_numbers_of_ranks() -> None:
    places = [(0, "a"), (1, "b"), (2, "a"), (3, "b"), (4, "b"), (5, "c")]
    assert node_groups(places) == [(0, 2), (1, 3, 4)]
    assert link_groups(places) == [[(0, 1), (2, 3)], [(1, 5)], [(5, 0)]]


def test_findings_and_report_of_ten_thousand_ranks_take_seconds() -> None:
    began = time.process_time()
    case: dict[str, Any] = {"world_size": 10_000, "facts": [rank_facts(rank, 4, 2500) for rank in range(10_000)]}
    for facts in case["facts"]:
        facts["stages"]["mpi"]["size"] = 10_000
        if facts["host"] in ("n700", "n701"):
            facts["versions"]["deepspeed"] = "0.15"
    ranks = gathered(**case)
    report = Report(ranks, apply_rules(ranks), 1.0)
    text = as_text(report)
    assert "deepspeed differs: n[700-701]: 0.15, all others 0.19.8" in text
    assert len(text.splitlines()) < 45
    assert "… 2476 more" in text
    assert time.process_time() - began < scaled(20)


def test_the_report_has_bad_findings_first_with_remedies() -> None:
    findings = changed(both(setting("shm|free", 0), setting("stages|ready|torch", "2.11.0")), N3)
    text = as_text(Report(gathered(**healthy()), findings, 12.34))
    assert text.index("bad   versions: torch differs") < text.index("warn  space: n3")
    assert text.count("      do: ") == 2
    assert text.splitlines()[-1] == ("preflight: unfit: 1 problem, 1 warning (8 of 8 ranks on 4 nodes in "
                                     "12.3 s)")
    assert "versions  python 3.11.7" in text


def test_the_report_file_has_common_facts_once() -> None:
    common, own = split_common_members([{"a": 1, "b": 1}, {"a": 1, "b": 2}, {"a": 1}])
    assert common == {"a": 1}
    assert own == [{"b": 1}, {"b": 2}, {}]
    common, own = split_common_members([{"a": 1}, {"a": 1}, {"a": 1}, {}])
    assert (common, own[3]) == ({"a": 1}, {"a": None})


@pytest.mark.parametrize(("names", "text"), [
    (["n1"], "n1"), (["n1", "n2", "n3", "n7"], "n[1-3,7]"), (["n08", "n09", "n10"], "n[08-10]"),
    (["x1c0s1b0n0", "x1c0s1b0n1"], "x1c0s1b0n[0-1]"), (["login", "n1"], "login,n1"),
    (["a1.x", "a2.x"], "a[1-2].x"), ([f"{letter}1" for letter in "abcdefgh"], "a1,b1,c1,d1,e1,f1 and 2 more"),
])
def test_hostnames_are_folded(names: list[str], text: str) -> None:
    assert node_ranges(names) == text


@pytest.mark.parametrize(("value", "text"), [
    (999.7e6, "1 GB/s"), (2.06e6, "2.06 MB/s"), (0, "0 B/s"), (3.5e15, "3.5 PB/s")])
def test_rates_are_formatted(value: float, text: str) -> None:
    assert format_rate(value, "B/s") == text


def test_oneccl_over_mpi_is_not_judged() -> None:
    answer = {"type": "network", "library": "oneCCL", "network": "mpi", "transport": "mpi"}
    assert changed(setting("stages|network", answer), network="ofi") == []
