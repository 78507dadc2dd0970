"""Slurm node lists, compared with Slurm's expansion: captured, and by this machine's scontrol."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from launch_runs import CAPTURED, cpu_seconds
from slowness import scaled

from ezpz_llm.core.base.errors import UserError
from ezpz_llm.launcher.basics.hostlist import expand_counts, expand_hostlist

needs_scontrol = pytest.mark.skipif(shutil.which("scontrol") is None, reason="no scontrol here (slurm-client)")


# Our expansion where Slurm 22.05 fails (text after a bracket is harmless) or prints an invalid node list.
_OURS = {
    "n[1-3]-ib": "n1-ib n2-ib n3-ib", "n[1-2]x,m5": "n1x n2x m5", "a[1-2]b[3-4]c": "a1b3c a1b4c a2b3c a2b4c",
    "(null)": "", "n[3-1]": None, "[n1-n2]": None, "n[1-2": None, "n[]": None, "n[1-]": None,
}


def test_captured_host_lists() -> None:
    rows = [line.split("\t") for line in
            (CAPTURED / "slurm/nodelist_expansions.tsv").read_text().splitlines()[1:]]
    assert len(rows) == 32
    for text, by_slurm in rows:
        expected = _OURS.get(text, by_slurm)
        if expected is None:
            with pytest.raises(UserError) as raised:
                expand_hostlist(text)
            assert repr(text) in str(raised.value)
        else:
            assert " ".join(expand_hostlist(text)) == expected, text


@pytest.mark.parametrize("text", ["n]", "n[1-2]]", "n[[1]", "n[a]", "n[1--2]", "n[1,]", "n[-1]", "n[0-9999999999]"])
def test_what_is_no_list_is_quoted(text: str) -> None:
    with pytest.raises(UserError) as raised:
        expand_hostlist(f"ok1,{text}")
    assert f"ok1,{text}" in str(raised.value)


def _scontrol(what: str, text: str, folder: Path) -> list[str]:
    """Run `scontrol show hostnames` (or hostlist), which needs a configuration but no server."""
    conf = folder / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    done = subprocess.run(["scontrol", "show", what, text], env=os.environ | {"SLURM_CONF": str(conf)},
                          capture_output=True, text=True, timeout=scaled(120), check=True)
    assert not done.stderr, done.stderr
    return done.stdout.split()


@st.composite
def _bracket(draw: st.DrawFn) -> str:
    items = []
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, 1200))
        width = draw(st.integers(0, 6))
        text = f"{first:0{width}d}"
        items.append(text if draw(st.booleans()) else f"{text}-{first + draw(st.integers(0, 30))}")
    return f"[{','.join(items)}]"


_LITERAL = st.from_regex(r"[a-z][a-z0-9]{0,3}(-|[.]x)?[a-z0-9]{0,3}", fullmatch=True)
_FEW = st.sampled_from(["[1-2]", "[3,1]", "[09-11]", "[7]", "[2]"])
_WORD = st.one_of(
    st.tuples(_LITERAL, _FEW, st.just("c"), _FEW, st.just("s"), _FEW).map("".join),
    st.tuples(_LITERAL, _FEW, st.just("c"), _FEW, st.just("s"), _FEW, st.just("b"), _FEW).map("".join),
    _LITERAL,
    st.tuples(_LITERAL, _bracket()).map("".join),
    st.tuples(_LITERAL, _bracket(), st.sampled_from(["c", "0s", "-", ""]), _bracket()).map("".join),
)


@needs_scontrol
@settings(max_examples=60, deadline=None)
@given(words=st.lists(_WORD, min_size=1, max_size=12), separator=st.sampled_from([",", " ", ", "]))
def test_any_list_expands_as_slurm_expands_it(tmp_path_factory: pytest.TempPathFactory, words: list[str],
                                              separator: str) -> None:
    text = separator.join(words)
    assert expand_hostlist(text) == _scontrol("hostnames", text, tmp_path_factory.getbasetemp())


@needs_scontrol
def test_ten_thousand_names_folded_by_slurm(tmp_path: Path) -> None:
    """Names as on Aurora, shuffled and with gaps."""
    chance = random.Random(1)
    names = [f"x{4000 + number // 64}c{number // 8 % 8}s{number % 8}b0n0" for number in range(5000)]
    names += [f"nid{number:06d}" for number in chance.sample(range(20000), 5000)]
    (folded,) = _scontrol("hostlist", ",".join(names), tmp_path)
    assert len(folded) < len(",".join(names))
    assert expand_hostlist(folded) == names


def test_long_lists_are_quick() -> None:
    text = ",".join(f"x[{4000 + rack}]c[0-7]s[0-7]b0n0" for rack in range(166))
    begun = cpu_seconds()
    hosts = expand_hostlist(text)
    assert len(hosts) == 166 * 64
    assert (hosts[0], hosts[-1]) == ("x4000c0s0b0n0", "x4165c7s7b0n0")
    # 10 ms on a quiet machine.
    assert cpu_seconds() - begun < scaled(1)


def test_slurm_counts() -> None:
    assert expand_counts("2(x2),1") == [2, 2, 1]
    assert expand_counts("1(x3)") == [1, 1, 1]
    with pytest.raises(UserError, match="2x3"):
        expand_counts("2x3")


@pytest.mark.parametrize("text", ["n[0-99][0-99][0-99][0-99]", "n[0-9]" * 6, "n[0-99999999]", "n[0-99999]," * 3,
                                  "n" * 300 + "[1-9]", "n[" + "9" * 5000 + "]", "[1]" * 40_000])
def test_a_list_is_counted_before_it_is_expanded(text):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError):
        expand_hostlist(text)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


@pytest.mark.parametrize("text", ["1(x900000000)", "1(x150000),1(x150000)", "9" * 5000, "99999999",
                                  "1(x" + "9" * 5000 + ")"])
def test_counts_are_counted_before_they_are_expanded(text):
    with pytest.raises(UserError):
        expand_counts(text)
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
