"""Read tracker files back as {metric: {step: value}}, with the tracker's own reader if it has one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

Curves = dict[str, dict[int, float]]


def tensorboard_curves(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    curves = {}
    for tag in events.Tags()["scalars"]:
        curves[tag] = {event.step: event.value for event in events.Scalars(tag)}
        assert len(curves[tag]) == len(events.Scalars(tag)), f"{tag}: one point a step"
    return curves


def mlflow_curves(folder: Path, run_id: str) -> Curves:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    names = client.get_run(run_id).data.metrics
    return {name: {point.step: point.value for point in client.get_metric_history(run_id, name)} for name in names}


def wandb_curves(folder: Path) -> Curves:
    """Return the curves of all offline runs, merged in the order of their start."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    curves: Curves = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in _records(path.read_bytes()):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json)
                     for item in Record.FromString(data).history.item}
            for name in items.keys() - {"step"}:
                curves.setdefault(name, {})[items.get("step", -1)] = items[name]
    return curves


def _records(file: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B file: a header of 7 bytes, then LevelDB's log format.

    The log has blocks of 32 KiB; records are split at their ends.
    """
    at, whole = 7, b""
    while at + 7 <= len(file):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", file, at)
        whole += file[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield whole
            whole = b""
