"""Download a GPT-2 or Llama model of the hub into huggingface_hub's own cache: only when asked to."""

from __future__ import annotations

import sys
from pathlib import Path

from ezpz_llm.base.outside import read_json
from ezpz_llm.errors import UserError
from ezpz_llm.hf.config import from_hf
from ezpz_llm.hf.source import CONFIG, WANTED, hub_library


def fetch(hub_id: str, revision: str | None) -> Path:
    """Download; its configuration first, so that a model that ours cannot compute costs no gigabytes.

    Raises:
        UserError: no network, no such model, or one that ours cannot compute.
    """
    hub = hub_library("models of the hub need the package huggingface_hub", "checkpoint fetch")
    print(f"downloading {hub_id} from {hub.constants.ENDPOINT}", file=sys.stderr, flush=True)
    try:
        config = Path(hub.hf_hub_download(hub_id, CONFIG, revision=revision))
        from_hf(read_json(config), f"{hub_id}/{CONFIG}")
        return Path(hub.snapshot_download(hub_id, revision=revision, allow_patterns=WANTED))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise UserError(f"the download failed: {str(error).splitlines()[0]}", where=hub_id,
                        instead="a hub id such as openai-community/gpt2, on a machine with a network; or copy the "
                                "model's folder here and name that", exit_code=1) from error
