"""What must not be written down: values of names that speak of a secret, wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "[redacted]"

# Environment names are upper case, where any mention counts; elsewhere only the whole word does, so that
# `tokens_per_second` or `tokenizer` keep their values.
_SECRET = re.compile(
    r"^[A-Z0-9_]*(TOKEN(?!IZER)|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)[A-Z0-9_]*$"
    r"|(^|_)(token|key|secret|password|credentials?)(_|$)"
)
# On a command line names of models' parts occur too (--num-key-value-heads): there the last word has to say it.
_SECRET_OPTION = re.compile(r"^--?(?:[a-z0-9]+[-_])*(?:token|key|secret|password|passwd|credentials?)$",
                            re.IGNORECASE)
_NO_SECRET_OPTION = re.compile(r"(?:^|[-_])(?:eos|bos|pad|unk|sep|cls|mask|special)[-_]token$", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"^(?P<before>(?:.*[\s,])?)(?P<name>-{0,2}[A-Za-z_][\w-]*)=(?P<value>.*)$", re.DOTALL)
_IN_URL = re.compile(r"(://[^/:@\s]+:)[^/@\s]+@")
_LEAST_CHARACTERS = 8


def redact(value: Any, name: str = "") -> Any:
    """`value` with every secret in it replaced by "[redacted]": the text of members whose name speaks of one, and
    words of command lines that follow or contain such a name."""
    if isinstance(value, dict):
        return {key: redact(member, str(key)) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        if not _SECRET.search(name) and all(isinstance(member, str) for member in value):
            return redact_words(value)
        return [redact(member, name) for member in value]
    if isinstance(value, str) and _SECRET.search(name):
        return HIDDEN
    return value


def redact_words(words: Sequence[str]) -> list[str]:
    """A command line without the secrets typed in it: `--hf-token XYZ`, `--api-key=XYZ`, `--env WANDB_API_KEY=XYZ`,
    `-genv HF_TOKEN XYZ`, `https://user:XYZ@host`."""
    shown, is_secret = [], False
    for word in words:
        if is_secret and not word.startswith("-"):
            shown.append(HIDDEN)
            is_secret = False
            continue
        assigned = _ASSIGNMENT.match(word)
        if assigned and _is_secret(assigned["name"]):
            shown.append(f"{assigned['before']}{assigned['name']}={HIDDEN}")
        else:
            shown.append(_IN_URL.sub(rf"\1{HIDDEN}@", word))
        is_secret = not assigned and _is_secret(word)
    return shown


def _is_secret(name: str) -> bool:
    if name.startswith("-"):
        return bool(_SECRET_OPTION.search(name)) and not _NO_SECRET_OPTION.search(name)
    return name.isupper() and bool(_SECRET.search(name))


def secret_values(env: Mapping[str, str]) -> tuple[str, ...]:
    """The secrets in an environment, longest first. Short values and paths are none."""
    found = {value for name, value in env.items()
             if _SECRET.search(name) and len(value) >= _LEAST_CHARACTERS and not value.startswith("/")}
    return tuple(sorted(found, key=len, reverse=True))


def hide(value: Any, secrets: Sequence[str]) -> Any:
    """`value` with each of the texts `secrets` in it replaced by "[redacted]"."""
    if isinstance(value, dict):
        return {key: hide(member, secrets) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide(member, secrets) for member in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
    return value
