"""Values that scripts store in checkpoints: round trips through the file, and errors before it is written."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import random
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from ezpz_llm.core.base import UserError, parse_json
from ezpz_llm.core.base.records import as_plain
from ezpz_llm.core.rundir import write_json
from ezpz_llm.training.checkpoint.state import State, read_state
from ezpz_llm.training.library import stored_values
from ezpz_llm.training.library.stored_values import MAX_DEPTH, from_json, to_json


def stored(value: Any, folder: Path) -> Any:
    """Return a value after a round trip through a checkpoint's state.json."""
    state = State(step=1, optimizer_step=1, loss_scale=None, world_size=1, user={"value": to_json(value, "value")})
    write_json(folder / "state.json", as_plain(state))
    return from_json(read_state(folder).user["value"])


def is_same(value: Any, other: Any) -> bool:
    """Return True for equal values of the same type, as are their members. NaN is equal to NaN."""
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape) == (other.dtype, other.shape) and bytes_of(value) == bytes_of(other)
    if isinstance(value, np.ndarray | np.generic):
        return (value.dtype.str, value.shape, value.tobytes()) == (other.dtype.str, other.shape, other.tobytes())
    if isinstance(value, float):
        return value.hex() == other.hex()
    if isinstance(value, collections.defaultdict) and value.default_factory != other.default_factory:
        return False
    if isinstance(value, dict):
        return is_same(list(value), list(other)) and is_same(list(value.values()), list(other.values()))
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(is_same, value, other))
    if isinstance(value, set | frozenset):
        return len(value) == len(other) and all(any(is_same(one, another) for another in other) for one in value)
    return bool(value == other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


TEXT = st.text(st.characters(codec=None), max_size=6)  # also surrogates and NUL
SIDES = st.lists(st.integers(0, 3), max_size=3)
TORCH = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64,
         torch.float8_e4m3fn]
NUMPY = ["<f4", ">f8", "?", "<i2", "<U3", "S2", "<c8", "<M8[s]"]
HASHABLE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-2**200, 2**200), st.floats(), TEXT,
              st.binary(max_size=9), st.builds(np.float32, st.floats(width=32)),
              st.builds(np.int64, st.integers(0, 9)), st.sampled_from([
                  torch.bfloat16, torch.Size([2, 3]), Path("a/b"), Path("\udcff"), np.str_("a")])),
    lambda member: st.lists(member, max_size=3).map(tuple) | st.frozensets(member, max_size=3), max_leaves=4)
ARRAYS = st.builds(lambda dtype, shape: np.ones(shape, dtype), st.sampled_from(NUMPY), SIDES) | st.builds(
    lambda dtype, shape: torch.randn(shape).to(dtype), st.sampled_from(TORCH), SIDES)
KEYS = HASHABLE | st.sampled_from(["$type", "items", "keys", "values"])
COUNTS = st.dictionaries(KEYS, st.integers(), max_size=3).map(collections.Counter)


def containers(member: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for containers of such members."""
    lists, dicts = st.lists(member, max_size=3), st.dictionaries(KEYS, member, max_size=3)
    return st.one_of(lists, lists.map(tuple), dicts, dicts.map(collections.OrderedDict),
                     dicts.map(lambda values: collections.defaultdict(list, values)))


VALUES = st.recursive(st.one_of(HASHABLE, ARRAYS, COUNTS, st.sets(HASHABLE, max_size=3)), containers, max_leaves=12)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(value=VALUES)
def test_values_are_read_back_with_their_types(tmp_path_factory: pytest.TempPathFactory, value: Any):
    assert is_same(stored(value, tmp_path_factory.getbasetemp()), value)


@pytest.mark.parametrize("value", [
    "\ud800", "\ud83d\ude00", "a\0", 2**63, -2**20_000, -0.0, np.longdouble(1) / 3, np.array(5),
    np.arange(6).reshape(2, 3).T, np.random.default_rng(0).bit_generator.state, random.Random(0).getstate(),
    torch.tensor(5), torch.zeros(0, 3), torch.randn(4, 6)[::2, 1:3], torch.randn(3, dtype=torch.cfloat).conj(),
    torch.get_rng_state(), {"$type": "tuple", "items": []},
    {1: "a", False: "b", None: "c", (1, "x"): "d", 2.5: "e"}],
    ids=lambda value: type(value).__name__)
def test_a_value_is_read_back(tmp_path: Path, value: Any):
    assert is_same(stored(value, tmp_path), value)


def test_json_values_stay_plain(tmp_path: Path):
    value = {"epoch": 3, "best": 0.5, "names": ["a", "é\U0001f600"], "no": [False, None], "deep": [{"": [[]]}]}
    assert to_json(value, "state") == value
    text = json.dumps(to_json({"nan": math.nan, "text": "\ud800", "large": 2**64}, "state"), allow_nan=False)
    assert "\\ud" not in text


def test_tensors_are_detached_copies(tmp_path: Path):
    weight = torch.ones(2, requires_grad=True)
    read = stored(weight * 2, tmp_path)
    assert not read.requires_grad
    assert read.tolist() == [2, 2]
    read.add_(1)  # writable
    stored(np.ones(2), tmp_path)[0] = 3


OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
SCHEDULERS = torch.optim.lr_scheduler


@pytest.mark.parametrize("make", [
    lambda: SCHEDULERS.LambdaLR(OPTIMIZER, lambda step: 1 / (step + 1)), lambda: SCHEDULERS.StepLR(OPTIMIZER, 2),
    lambda: SCHEDULERS.MultiStepLR(OPTIMIZER, [2, 2, 3]), lambda: SCHEDULERS.CosineAnnealingLR(OPTIMIZER, 8),
    lambda: SCHEDULERS.OneCycleLR(OPTIMIZER, 0.1, 10), lambda: SCHEDULERS.CyclicLR(OPTIMIZER, 0.1, 1.0),
    lambda: SCHEDULERS.ReduceLROnPlateau(OPTIMIZER), lambda: SCHEDULERS.CosineAnnealingWarmRestarts(OPTIMIZER, 3),
    lambda: SCHEDULERS.SequentialLR(
        OPTIMIZER, [SCHEDULERS.LinearLR(OPTIMIZER), SCHEDULERS.StepLR(OPTIMIZER, 2)], [3])])
def test_states_of_schedulers_are_read_back(tmp_path: Path, make: Any):
    """Check the states of torch's schedulers: tuples, Counters, Inf, nested lists."""
    scheduler = make()
    OPTIMIZER.step()
    scheduler.step(*[1.0] if isinstance(scheduler, SCHEDULERS.ReduceLROnPlateau) else [])
    state = scheduler.state_dict()
    assert is_same(stored(state, tmp_path), state)
    make().load_state_dict(stored(state, tmp_path))


def nested(depth: int, wrap: Any) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: {1: x}])
def test_the_deepest_value_can_be_read(tmp_path: Path, wrap: Any):
    deepest = nested(MAX_DEPTH, wrap)
    assert is_same(stored(deepest, tmp_path), deepest)
    with pytest.raises(UserError, match=f"is nested more than {MAX_DEPTH} levels deep"):
        to_json(wrap(deepest), "state")


class Point(collections.namedtuple("Point", "x")):
    """Tuple of another type, which would lose its members on reading."""


CYCLE: list[Any] = [1]
CYCLE.append({"x": CYCLE})


@pytest.mark.parametrize(("value", "message", "instead"), [
    ({"scheduler": {"lr_lambdas": [len, print]}}, "state.scheduler.lr_lambdas[0] is a builtin_function", "numbers"),
    ({"a b": [{3: lambda: 1}]}, "state['a b'][0][3] is a function, which a checkpoint cannot store", "tensors"),
    ({"schedule": SCHEDULERS.StepLR(OPTIMIZER, 2)}, "state.schedule is a StepLR", "its state_dict()"),
    ({"w": torch.nn.Parameter(torch.ones(1))}, "state.w is a Parameter", "parameter.detach()"),
    (Point(1), "state is a Point", "tuples"), (PurePosixPath("a"), "state is a PurePosixPath", "strings"),
    ({"c": CYCLE}, "state.c[1].x contains itself", "a copy"),
    (np.array([object()]), "state is a NumPy array of object", "numbers"),
    (np.zeros(1, "i4,f4"), "state is a NumPy array of", "numbers"),
    (np.ma.masked_array([1]), "state is a MaskedArray", "lists"),
    (torch.ones(2).to_sparse(), "state is a Tensor", "dense"),
    (torch.ones(2, device="meta"), "state is a Tensor", "on a device"),
    ({torch.ones(()): 1}, "state has a key with a tensor", "a string"),
    (collections.defaultdict(lambda: 1), "state is a defaultdict of '<lambda>'", "int")])
def test_what_cannot_be_read_back_is_rejected(value: Any, message: str, instead: str):
    with pytest.raises(UserError) as error:
        to_json(value, "state")
    assert message in error.value.found
    assert instead in str(error.value.instead)


@pytest.mark.parametrize("value", [
    [1.5] * 1000, [{"a": [(i, 2**70)]} for i in range(99)], ["\0" * 2000], [b"x" * 5000], ["\ud800" * 2000],
    [np.zeros((1, 1, 1, 1))] * 30, [torch.zeros(1, 1)] * 30, {"x" * 9000: 1}, [np.float32(1)] * 50])
def test_the_size_is_limited(monkeypatch: pytest.MonkeyPatch, value: Any):
    """Check that text within the limit is accepted, and that the limit holds for the text in the file."""
    size = len(json.dumps({"user": {"value": to_json(value, "value")}}, indent=2))
    for limit, fits in ((size - 100, False), (3 * size, True)):
        monkeypatch.setattr(stored_values, "MAX_BYTES", limit)
        if fits:
            to_json(value, "state")
        else:
            with pytest.raises(UserError, match="does not fit: a checkpoint stores up to"):
                to_json(value, "state")


def test_a_large_tensor_is_rejected_before_it_is_copied():
    huge = torch.zeros(1).expand(2**40)
    with pytest.raises(UserError, match=r"state\.ema\[1\] does not fit"):
        to_json({"ema": [1, huge]}, "state")


def array(dtype: Any = "<f4", shape: Any = (1,), data: Any = "AAAAAA==", kind: str = "numpy.ndarray") -> Any:
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {"$type": kind, "dtype": dtype, "shape": shape, "data": data}


@pytest.mark.parametrize("value", [
    {"$type": "unknown"}, {"$type": ["tuple"]}, {"$type": None}, {"$type": "tuple"},
    {"$type": "tuple", "items": "ab"}, {"$type": "tuple", "items": [], "more": 1}, {"$type": "set", "items": [[]]},
    {"$type": "int", "hex": "x"}, {"$type": "int", "hex": 5},
    {"$type": "float", "value": "1.0"}, {"$type": "float", "value": []},
    {"$type": "bytes", "data": "?"}, {"$type": "str", "data": "/w=="}, {"$type": "Path", "value": 1},
    {"$type": "dict", "keys": ["a"], "values": []}, array(shape="1"), array(shape=[[1]]),
    {"$type": "dict", "keys": ["a", "a"], "values": [1, 2]},
    {"$type": "dict", "keys": [[]], "values": [1]}, {"$type": "Counter", "keys": 1, "values": 2},
    {"$type": "defaultdict", "factory": "eval", "keys": [], "values": []},
    {"$type": "torch.dtype", "name": "torch.load"},
    {"$type": "torch.dtype", "name": 3}, {"$type": "torch.Size", "items": ["a"]}, array("O"), array("|O"),
    array("<f4,<f4"), array(3), array(shape=(2,)), array(shape=(-1,)), array(shape=(True,)),
    array(shape=("1",)), array(shape=(0, 2**70), data=""), array("<U0", (10**12,), ""), array("<U999999999"),
    array("<M8[xx]", data="AAAAAAAAAAA="), array(data=1), array(shape=(1,) * 99),
    array("torch.float32", (2,), kind="torch.Tensor"), array("torch.nothing", kind="torch.Tensor"),
    array("torch.load", kind="torch.Tensor"), array("torch.float32", (0, 2**70), "", kind="torch.Tensor"),
    array("torch.float32", data="AAA=", kind="torch.Tensor"), nested(500, lambda x: [x])], ids=str)
def test_a_damaged_value_is_rejected(value: Any):
    with pytest.raises(UserError, match=r"state\.json"):
        from_json({"value": [value]})


NAMES = ["$type", "items", "keys", "values", "data", "dtype", "shape", "hex", "value", "factory", "name"]
WORDS = [*stored_values._READERS, "<f4", "torch.int8", "AAAA", "list"]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(value=st.recursive(
    st.none() | st.integers(-9, 2**40) | st.sampled_from(WORDS),
    lambda member: st.lists(member, max_size=3) | st.dictionaries(st.sampled_from(NAMES), member)))
def test_other_json_raises_only_user_errors(value: Any):
    with contextlib.suppress(UserError):
        from_json(parse_json(json.dumps(value), "state.json"))
