"""Source of a model's weights: a run's checkpoint, a Hugging Face folder or a hub id (imports no torch)."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ezpz_llm.core.base import UserError, nearest_names, print_lines, read_json, untrusted_input, user_path
from ezpz_llm.training.checkpoint import DamagedCheckpointError, find
from ezpz_llm.training.checkpoint.manifest import STATE
from ezpz_llm.training.checkpoint.state import State, read_state
from ezpz_llm.training.data.manifest import TokenizerEntry
from ezpz_llm.training.hf.config import ARCHITECTURES, from_hf
from ezpz_llm.training.model.config import ModelConfig

CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_WANTED = ["*.json", "*.safetensors", "*.model"]
"""Files to download for a model from the hub; none of them is unpickled or executed."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """Folder with weights, and the configuration of their model.

    Attributes:
        kind: "checkpoint" of the trainer, checkpoint of a "script" with a Hugging Face model, or "hf" folder.
        tokenizer: the tokenizer's entry in the manifest of the run's token shards (see
            `ezpz_llm.training.data.tokenizers`), None if unknown.
        state: content of a checkpoint's state.json, None for a Hugging Face folder.
    """

    kind: Literal["checkpoint", "script", "hf"]
    folder: Path
    model: ModelConfig
    tokenizer: TokenizerEntry | None
    state: State | None

    def describe(self) -> str:
        """Return folder and step, for messages."""
        return f"{self.folder} (step {self.state.step})" if self.state is not None else str(self.folder)


def find_source(where: str, option: str) -> Source:
    """Return the source that `where` names: a run directory, a checkpoint, a folder with config.json, or a hub id.

    A hub id is looked up in the local cache of huggingface_hub only, without a download.

    Args:
        option: command-line option of `where`, for messages.

    Raises:
        UserError: nothing is found, or the model is not supported.
    """
    return source_in(find_folder(where, option))


def source_in(folder: Path) -> Source:
    """Return the source in a checkpoint, or in a Hugging Face folder.

    Raises:
        UserError: the checkpoint is damaged, or the model is not supported.
    """
    if _is_hf(folder):
        return _hf_source(folder)
    state = read_state(folder)
    if state.is_of_script:
        return Source("script", folder, _model_of_script(folder, state), None, state)
    return Source("checkpoint", folder, state.config(folder), state.tokenizer, state)


def script_state(folder: Path) -> State | None:
    """Return the content of state.json of a script's checkpoint; None for other folders from `find_folder`.

    Raises:
        DamagedCheckpointError: state.json is missing or invalid.
    """
    state = None if _is_hf(folder) else read_state(folder)
    return state if state is not None and state.is_of_script else None


def _is_hf(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / _ADAPTER).is_file()


def export_advice(folder: Path) -> str:
    """Return the advice for a script's model that only the script's libraries can compute."""
    return f"ezpz-llm checkpoint export {folder} OUT, and load OUT with transformers or torch"


def _model_of_script(folder: Path, state: State) -> ModelConfig:
    """Return the plain model that computes the same as a script's model.

    Raises:
        UserError: there is none.
    """
    models = state.script_models
    if len(models) > 1:
        raise UserError(f"the script's checkpoint has {len(models)} models: {', '.join(models)}", where=str(folder),
                        instead=f"ezpz-llm checkpoint export {folder} OUT, and pass OUT/NAME of one of them")
    (model,) = models.values()
    if model.config is None or model.class_name not in ARCHITECTURES:
        raise UserError(f"the checkpoint has a script's {model.class_name}, but only "
                        f"{', '.join(ARCHITECTURES)} are supported", where=str(folder),
                        instead=export_advice(folder))
    try:
        return from_hf(model.config, str(folder / STATE))
    except UserError as error:
        raise UserError(f"the checkpoint has a script's {model.class_name} with unsupported settings: "
                        f"{error.found}", where=str(folder), instead=export_advice(folder)) from error


def find_folder(where: str, option: str) -> Path:
    """Return the folder that `where` names: a checkpoint, or a folder with config.json.

    Args:
        where, option: see `find_source`.

    Raises:
        UserError: nothing is found.
    """
    path = user_path(where)
    if path.is_dir():
        return path if _is_hf(path) else find_checkpoint(path, option)
    # "runs/a" looks like a hub id, but means a missing run.
    if not path.is_absolute() and path.parent.name and (path.parent.is_dir() or path.parent == Path("runs")):
        return find_checkpoint(path, option)
    if path.exists() or not _HUB_ID.fullmatch(where):
        raise UserError(f"no folder at {path}", where=option,
                        instead="a run directory, a checkpoint, or a Hugging Face folder or hub id")
    try:
        return _cached_snapshot(where, option)
    except UserError:
        if "/" in where:
            raise
        # Few hub models have no owner, so a name without a slash is probably a run.
        raise _no_such_run(where, option) from None


def _no_such_run(name: str, option: str) -> UserError:
    near = [str(folder / match) for folder in (Path(), Path("runs")) if folder.is_dir()
            for match in nearest_names(name, [entry.name for entry in folder.iterdir() if entry.is_dir()])]
    return UserError(f"no run directory, checkpoint or model folder at {name}", where=option,
                     instead=f"did you mean {' or '.join(near)}?" if near
                     else f"the path of a folder; for a model of the hub, the id with its owner: OWNER/{name}")


def adapter_error(folder: Path) -> UserError:
    """Return the error for an adapter's folder, which lacks the base model's weights."""
    return UserError("this is a LoRA adapter of PEFT, not a complete model", where=str(folder),
                     instead="merge it into its base model: PeftModel.from_pretrained(base, FOLDER)"
                             ".merge_and_unload().save_pretrained(DIR), then pass DIR")


def _hf_source(folder: Path) -> Source:
    if (folder / _ADAPTER).is_file():
        raise adapter_error(folder)
    path = folder / CONFIG
    try:
        stored = untrusted_input.read_json(path)
    except UserError as error:
        raise UserError(f"config.json cannot be read: {error.found}", where=error.where) from error
    if not isinstance(stored, dict):
        raise UserError("config.json is not a JSON object", where=str(path),
                        instead="the config.json that belongs to the weights")
    return Source("hf", folder, from_hf(stored, str(path)), None, None)


def find_checkpoint(path: Path, option: str) -> Path:
    """Return the checkpoint at `path`, or the newest intact one of a run directory.

    Args:
        option: command-line option of `path`, for messages.

    Raises:
        UserError: there is no checkpoint, or it is damaged.
    """
    try:
        return find(path)
    except DamagedCheckpointError:
        raise
    except UserError as error:
        raise UserError(error.found, where=option, instead=error.instead) from None


def _cached_snapshot(hub_id: str, option: str) -> Path:
    """Return the snapshot of a hub id in the local cache."""
    hub = _hub_library(f"there is no folder {hub_id}, and looking up a hub id requires huggingface_hub", option)
    try:
        return Path(hub.snapshot_download(hub_id, local_files_only=True, allow_patterns=_WANTED))
    except (hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError) as error:
        raise UserError(f"there is no folder {hub_id}, and no model with that id in huggingface_hub's local cache",
                        where=option,
                        instead=f"ezpz-llm checkpoint fetch {hub_id}, on a machine with internet access") from error


def _hub_library(missing: str, where: str) -> Any:
    """Import and return huggingface_hub.

    Args:
        missing: error message if it is not installed.

    Raises:
        UserError: it is not installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise UserError(missing, where=where,
                        instead="pip install 'ezpz_llm[hf]', or pass a local folder") from error
    return huggingface_hub


def with_model_changes(model: ModelConfig, where: str, **changes: Any) -> ModelConfig:
    """Return the model with changed settings, as far as its weights allow; None leaves a setting unchanged.

    dropout and vocab_multiple may take any value, and the context may be shortened (with rotary embeddings, also
    extended).

    Raises:
        UserError: the weights do not allow a change.
    """
    requested = {name: value for name, value in changes.items() if value is not None}
    for name, value in requested.items():
        ours = getattr(model, name)
        free = name in ("dropout", "vocab_multiple") or (
            name == "block_size" and (model.position == "rope" or value <= ours))
        if not free and value != ours:
            raise UserError(f"{name} is {value}, the weights have {ours}", where=where,
                            instead=f"omit --{name.replace('_', '-')}"
                                    + (f", or pass at most {ours}" if name == "block_size" else ""))
    return replace(model, **requested)


def fetch(hub_id: str, revision: str | None) -> Path:
    """Download a model from the hub into huggingface_hub's cache; return its folder.

    The configuration is downloaded first, so that an unsupported model is rejected before gigabytes are downloaded.

    Raises:
        UserError: there is no network, or the model does not exist or is not supported.
    """
    hub = _hub_library("downloading a model requires the package huggingface_hub", "checkpoint fetch")
    print_lines(f"downloading {hub_id} from {hub.constants.ENDPOINT}", file=sys.stderr)
    try:
        config = Path(hub.hf_hub_download(hub_id, CONFIG, revision=revision))
        from_hf(read_json(config), f"{hub_id}/{CONFIG}")
        return Path(hub.snapshot_download(hub_id, revision=revision, allow_patterns=_WANTED))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise UserError(f"the download failed: {str(error).splitlines()[0]}", where=hub_id,
                        instead="pass a hub id such as openai-community/gpt2, on a machine with internet access, "
                                "or copy the model's folder here and pass its path", exit_code=1) from error
