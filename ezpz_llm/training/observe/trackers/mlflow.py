"""MLflow tracker: a SQLite file in `trackers/mlflow`, or the server in MLFLOW_TRACKING_URI if online."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import chain, islice

from ezpz_llm.training.observe.trackers.tracker import Row, TrackerArguments, flatten_settings

_METRICS_AT_ONCE = 1000
_PARAMS_AT_ONCE = 100
_LONGEST_VALUE = 500
"""Limits of the REST API of the oldest servers; newer servers allow more."""


class MLflow:
    """MLflow run in the experiment `ezpz_llm`, or that in MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, arguments: TrackerArguments) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # read on import, which would otherwise send telemetry
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        uri = None if arguments.online else f"sqlite:///{arguments.folder}/mlflow.db"
        artifacts = None if arguments.online else (arguments.folder / "artifacts").as_uri()
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=uri)
        if arguments.run_id is not None:
            self.run_id = arguments.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ezpz_llm")
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment, artifacts)
        self.run_id = self._client.create_run(number, run_name=arguments.name).info.run_id
        params = iter([Param(name, str(value)[:_LONGEST_VALUE]) for name,
                       value in flatten_settings(arguments.settings).items()])
        while batch := list(islice(params, _PARAMS_AT_ONCE)):
            self._client.log_batch(self.run_id, params=batch)

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows, with up to 1000 numbers per transaction."""
        metrics = chain.from_iterable(
            (self._metric(name, value, int(row.time * 1e3), row.step) for name, value in row.values.items())
            for row in rows)
        while batch := list(islice(metrics, _METRICS_AT_ONCE)):
            self._client.log_batch(self.run_id, metrics=batch)

    def rewind(self, step: int) -> None:
        """Do nothing: MLflow cannot delete metrics, so repeated steps have several values."""

    def close(self, failed: bool) -> None:
        """Set the final status of the run."""
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


open_tracker = MLflow
