"""Conversion of a script's values to JSON and back, with the same values and types.

JSON values stay as they are. Any other value becomes an object with the key "$type", such as
`{"$type": "tuple", "items": [1, 2]}`. Reading neither evaluates nor unpickles anything. NumPy and torch are
imported only to read values of theirs.
"""

from __future__ import annotations

import json
import math
import re
import sys
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ezpz_llm.core.base import UserError, shorten_value
from ezpz_llm.core.base.schema import MAX_INTEGER

MAX_BYTES = 64 << 20
"""Maximum size of the JSON text of all values."""
MAX_DEPTH = 40
"""Maximum nesting depth. Each level takes up to two levels of JSON, of which readers accept 100."""

_TYPE = "$type"
_NON_FINITE = {repr(number): number for number in (math.nan, math.inf, -math.inf)}
_FACTORIES: dict[str, type] = {kind.__name__: kind
                               for kind in (bool, bytes, dict, float, int, list, set, str, tuple)}
"""Values of `default_factory` of a defaultdict, besides None."""
_NUMPY_DTYPE = re.compile(r"[<>|][biufcmMUS][0-9]{1,9}(\[[0-9]{0,9}[A-Za-z]{1,7}\])?")
"""Pattern of `dtype.str`, without objects and structures."""


def to_json(value: Any, name: str) -> Any:
    """Return a JSON value that `from_json` converts to a value of the same type that is equal to `value`.

    Supports JSON values, NaN and Inf, integers of any size, tuples, sets, bytes, paths, dictionaries with any of
    these as keys, OrderedDict, defaultdict, Counter, NumPy arrays and scalars, and torch's tensors, dtypes and
    sizes. Tensors lose their device and requires_grad.

    Args:
        name: name of the value in messages, such as "state".

    Raises:
        UserError: a value has another type or contains itself, nesting exceeds MAX_DEPTH, or the JSON text exceeds
            MAX_BYTES. The message has the path of the value, such as state.scheduler.lr_lambdas[0].
    """
    return _Encoder(name).encode(value)


def from_json(value: Any, where: str = "state.json") -> Any:
    """Return the value that `to_json` has converted. Tensors are on the CPU.

    Args:
        value: parsed JSON, which is not trusted.
        where: source of the value, for the message.

    Raises:
        UserError: the value was not written by `to_json`.
    """
    return _decode(value, where, 0)


class _Encoder:
    """Conversion of one value to JSON.

    `_path` has the name of the value, and the keys and indices on the way to the current one; `_outer` has the ids
    of the containers around it.
    """

    def __init__(self, name: str) -> None:
        self._path: list[Any] = [name]
        self._outer: list[int] = []
        self._size = 0

    def encode(self, value: Any) -> Any:
        """Convert the value at `_path`."""
        self._count(self._line)
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self._text(value)
        if kind is int:
            is_short = abs(value) <= MAX_INTEGER
            text = self._counted(str(value) if is_short else hex(value))
            return value if is_short else self._object("int", hex=text)
        if kind is float:
            text = self._counted(repr(value))
            return value if math.isfinite(value) else self._object("float", value=text)
        if kind is bytes:
            return self._object("bytes", data=self._base64(len(value), lambda: value))
        if kind is type(Path()):
            return self._object("Path", value=self._text(str(value)))
        return self._container(value) if kind in _CONTAINERS else self._array(value)

    def _container(self, value: Any) -> Any:
        if id(value) in self._outer:
            raise self._error("contains itself", "a copy of the part that is needed")
        if len(self._outer) == MAX_DEPTH:
            raise self._error(f"is nested more than {MAX_DEPTH} levels deep", "fewer levels")
        self._outer.append(id(value))
        encoded = self._mapping(value) if isinstance(value, dict) else self._items(value)
        self._outer.pop()
        is_plain = isinstance(value, dict | list)
        return encoded if is_plain else self._object(type(value).__name__, items=encoded)

    def _items(self, items: Iterable[Any]) -> list[Any]:
        return [self._member(number, item) for number, item in enumerate(items)]

    def _mapping(self, value: dict[Any, Any]) -> dict[str, Any]:
        kind = type(value)
        if kind is dict and _TYPE not in value and all(map(_is_plain_text, value)):
            return {self._counted(key): self._member(key, member) for key, member in value.items()}
        factory = {"factory": self._factory(value)} if isinstance(value, defaultdict) else {}
        return self._object(kind.__name__, **factory, keys=[self._key(key) for key in value],
                            values=[self._member(key, member) for key, member in value.items()])

    def _member(self, step: Any, value: Any) -> Any:
        self._path.append(step)
        encoded = self.encode(value)
        self._path.pop()
        return encoded

    def _key(self, key: Any) -> Any:
        if _has_tensor(key):
            raise self._error("has a key with a tensor, which is equal only to itself", "a number or a string")
        return self._member(key, key)

    def _factory(self, value: defaultdict[Any, Any]) -> str | None:
        factory: Any = value.default_factory
        if factory is None:
            return None
        if factory not in _FACTORIES.values():
            name = shorten_value(getattr(factory, "__name__", factory))
            raise self._error(f"is a defaultdict of {name}, which a checkpoint cannot store",
                              f"dict(…), or a defaultdict of {', '.join(_FACTORIES)}")
        return str(factory.__name__)

    def _array(self, value: Any) -> dict[str, Any]:
        """Convert an array, or a value of another type of NumPy or torch."""
        torch: Any = sys.modules.get("torch")
        numpy: Any = sys.modules.get("numpy")
        kind = type(value)
        if torch and kind is torch.Size:
            return self._object("torch.Size", items=self._items(value))
        if torch and kind is torch.dtype:
            return self._object("torch.dtype", name=str(value))
        if torch and kind is torch.Tensor and _is_plain_tensor(value):
            return self._object("torch.Tensor", dtype=str(value.dtype), shape=self._items(value.shape),
                                data=self._base64(value.numel() * value.element_size(), lambda: _elements(value)))
        if numpy and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            array = numpy.asarray(value)
            if _is_plain_array(array, value):
                scalar = isinstance(value, numpy.generic)
                shape = {} if scalar else {"shape": self._items(array.shape)}
                return self._object("numpy.generic" if scalar else "numpy.ndarray", dtype=array.dtype.str, **shape,
                                    data=self._base64(array.nbytes, array.tobytes))
        raise self._unsupported(value)

    def _object(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._count((len(fields) + 2) * (self._line + 32))
        return {_TYPE: kind, **fields}

    def _text(self, value: str) -> Any:
        if _is_plain_text(value):
            return self._counted(value)
        data = value.encode("utf-8", "surrogatepass")
        return self._object("str", data=self._base64(len(data), lambda: data))

    def _base64(self, size: int, read: Callable[[], bytes]) -> str:
        self._count(size * 4 // 3 + 4)  # before the data are copied
        return b64encode(read()).decode()

    def _counted(self, text: str) -> str:
        self._count(len(json.dumps(text)))
        return text

    @property
    def _line(self) -> int:
        """Characters of a line besides the value: indentation of two levels of JSON per container, punctuation."""
        return 4 * len(self._outer) + 8

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > MAX_BYTES:
            raise self._error(f"does not fit: a checkpoint stores up to {MAX_BYTES >> 20} MiB of values as JSON",
                              "torch.save to a file of your own for large values")

    def _unsupported(self, value: Any) -> UserError:
        name = f"NumPy array of {value.dtype}" if type(value).__name__ == "ndarray" else type(value).__name__
        article = "an" if name[0] in "AEIOUaeiou" else "a"
        instead = "numbers, strings, lists, tuples, dicts, NumPy arrays or tensors"
        if callable(getattr(value, "state_dict", None)):
            instead = "its state_dict()"
        elif callable(getattr(value, "detach", None)):
            instead = "a dense tensor on a device, such as parameter.detach()"
        return self._error(f"is {article} {name}, which a checkpoint cannot store", instead)

    def _error(self, problem: str, instead: str) -> UserError:
        steps = "".join(map(_step, self._path[1:]))
        path = self._path[0] + (steps if len(steps) <= _LONGEST_PATH else f"{steps[:_LONGEST_PATH]}…")
        return UserError(f"{path} {problem}", where="ezpz_llm.save_checkpoint", instead=instead)


_LONGEST_PATH = 300
_CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict, defaultdict, Counter)


def _step(key: Any) -> str:
    """Return the part of a path for a key."""
    if isinstance(key, str) and key.isidentifier():
        return f".{shorten_value(key)[1:-1]}"
    return f"[{shorten_value(key)}]"


def _is_plain_text(value: Any) -> bool:
    """Return True for a string without surrogates, which readers of JSON reject, replace or join to pairs."""
    if type(value) is not str:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _has_tensor(key: Any) -> bool:
    torch = sys.modules.get("torch")
    return bool(torch) and (isinstance(key, torch.Tensor) or (  # type: ignore[union-attr]
        isinstance(key, tuple | frozenset) and any(map(_has_tensor, key))))


def _is_plain_tensor(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested)


def _elements(tensor: Any) -> bytes:
    """Return the elements of a tensor in C order. NumPy lacks dtypes such as bfloat16."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return bytes(flat.view(sys.modules["torch"].uint8).numpy().tobytes())


def _is_plain_array(array: Any, value: Any) -> bool:
    """Return True for an array of numbers, times or strings. A NumPy string loses NULs at its end in an array."""
    return bool(array.itemsize and _NUMPY_DTYPE.fullmatch(array.dtype.str) and (
        array is value or array.dtype.kind not in "SU" or array[()] == value))


def _decode(value: Any, where: str, depth: int) -> Any:
    if depth > 3 * MAX_DEPTH:
        raise UserError("values are nested too deeply", where=where)
    if isinstance(value, list):
        return [_decode(member, where, depth + 1) for member in value]
    if not isinstance(value, dict):
        return value
    fields = {name: _decode(member, where, depth + 1) for name, member in value.items() if name != _TYPE}
    if _TYPE not in value:
        return fields
    kind = value[_TYPE]
    try:
        read = _READERS[kind]
    except (KeyError, TypeError):
        raise UserError(f"a value has the unknown {_TYPE} {shorten_value(kind)}", where=where,
                        instead="the version of ezpz_llm that saved it") from None
    try:
        return read(**fields)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"a value of {_TYPE} {shorten_value(kind)} is damaged: {shorten_value(str(error))}",
                        where=where) from error


def _read_str(data: str) -> str:
    return b64decode(data, validate=True).decode("utf-8", "surrogatepass")


def _read_dict(kind: Callable[..., Any], keys: list[Any], values: list[Any]) -> Any:
    read = kind(zip(_list(keys), _list(values), strict=True))
    if len(read) != len(keys):
        raise ValueError("duplicate keys")
    return read


def _read_defaultdict(factory: str | None, keys: list[Any], values: list[Any]) -> defaultdict[Any, Any]:
    return defaultdict(None if factory is None else _FACTORIES[factory], _read_dict(dict, keys, values))


def _list(items: Any) -> list[Any]:
    if not isinstance(items, list):
        raise TypeError("not a list")
    return items


def _read_array(dtype: str, data: str, shape: Sequence[int] = ()) -> Any:
    import numpy as np

    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError("unsupported dtype")
    kind, content = np.dtype(dtype), b64decode(data, validate=True)
    _check_size(shape, kind.itemsize, content)
    return np.frombuffer(content, kind).reshape(shape).copy() if content else np.empty(shape, kind)


def _read_tensor(dtype: str, data: str, shape: Sequence[int]) -> Any:
    import torch

    kind, content = _read_dtype(dtype), bytearray(b64decode(data, validate=True))
    _check_size(shape, kind.itemsize, content)
    return torch.frombuffer(content, dtype=kind).reshape(shape) if content else torch.empty(shape, dtype=kind)


def _check_size(shape: Sequence[int], item_size: int, content: Sequence[int]) -> None:
    """Check the size of an array before memory is allocated."""
    if not item_size or not all(type(side) is int and side >= 0 for side in shape) or (
            math.prod(shape) * item_size != len(content)):
        raise ValueError("shape and data differ")


def _read_dtype(name: str) -> Any:
    import torch

    dtype = vars(torch)[name.removeprefix("torch.")]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("not a dtype")
    return dtype


def _read_size(items: list[int]) -> Any:
    import torch

    return torch.Size(_list(items))


_READERS: dict[str, Callable[..., Any]] = {
    "int": lambda hex: int(hex, 16),
    "float": lambda value: _NON_FINITE[value],
    "str": _read_str,
    "bytes": lambda data: b64decode(data, validate=True),
    "Path": lambda value: Path(value),
    "tuple": lambda items: tuple(_list(items)),
    "set": lambda items: set(_list(items)),
    "frozenset": lambda items: frozenset(_list(items)),
    "dict": lambda keys, values: _read_dict(dict, keys, values),
    "OrderedDict": lambda keys, values: _read_dict(OrderedDict, keys, values),
    "Counter": lambda keys, values: _read_dict(lambda pairs: Counter(dict(pairs)), keys, values),
    "defaultdict": _read_defaultdict,
    "numpy.ndarray": _read_array,
    "numpy.generic": lambda dtype, data: _read_array(dtype, data)[()],
    "torch.Tensor": _read_tensor,
    "torch.Size": _read_size,
    "torch.dtype": _read_dtype,
}
"""Readers of the objects with a "$type". Their parameters are the other members of the object."""
