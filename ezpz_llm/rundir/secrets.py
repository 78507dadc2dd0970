"""Redaction of secrets: values of names that speak of one, wherever they stand.

A name speaks of one by its words: `HF_TOKEN`, `db_password`, `--api-key`, `Authorization`. In capitals, as
variables of the environment are written, any mention counts (`APIKEY`); elsewhere only a whole word does, so that
`tokens_per_second` or `tokenizer` keep their values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

HIDDEN = "[redacted]"

_IN_CAPITALS = re.compile(
    r"TOKEN(?!IZER)|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(^|_)AUTHORIZATION|(^|_)(AUTH|PASS|JWT|PAT)$|_PWD$")
_WORDS = r"token|key|secret|password|passwd|passphrase|credentials?|authorization"
# At the end of a name only: `forward_pass_s` and `auth_method` are none.
_LAST_WORDS = rf"{_WORDS}|auth|pass|pwd|jwt|pat"
_IN_A_NAME = re.compile(rf"(^|_)({_WORDS})(_|$)|(^|_)({_LAST_WORDS})$")
# On a command line names of models' parts occur too (--num-key-value-heads): there the last word has to say it.
_LAST_IN_A_NAME = re.compile(rf"(^|_)({_LAST_WORDS})$")
_NO_SECRET = re.compile(r"(^|_)((eos|bos|pad|unk|sep|cls|mask|special)_token|text_key)$")
"""Settings whose names sound like one."""
_BETWEEN_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-.\s]")

_ASSIGNED = re.compile(
    r"""(?<![\w.-])(?P<name>[-+]{0,2}[A-Za-z_][\w.-]*)
        (?P<by>=|["']\s*:\s*|:\s+)
        (?P<value>"[^"]*"|'[^']*'|(?<==)[^\s,;&"']+|(?<!=)[^\s,}"'][^,}\n"']*)""", re.VERBOSE)
"""`NAME=value`, `name: value` or `"name": "value"` in the middle of a text."""
_WHOLE = re.compile(r"^(?P<before>[-+]{0,2}(?P<name>[A-Za-z_][\w.-]*)=).+$", re.DOTALL)
"""A word that is one assignment: its value may have anything in it."""
_NAMES_THE_NEXT = re.compile(r"^(?:-[^=]*|[A-Z0-9_]+|[\w.-]+:)$")
"""`--password`, `HF_TOKEN` or `password:`; a plain word such as `token` may be a command."""
_IN_URL = re.compile(r"(://[^/:@\s]+:)([^/@\s]+)@")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)")
"""Tokens that are known by how they look: of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS; JSON Web Tokens."""
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_OPTIONS_OF = {"sshpass": ("-p",), "curl": ("-u", "--user", "-U", "--proxy-user", "-b", "--cookie")}
"""Options of programs whose letters tell nothing: for others -p may be a port."""
_LEAST_CHARACTERS = 8
_MOST_ASSIGNMENTS = 200
"""Looked at in one word; nobody types more, and each may lie in the one before."""


def redact(value: Any, name: str = "") -> Any:
    """`value` with every secret in it replaced by "[redacted]": the text of members whose name speaks of one, and
    words of command lines that follow or contain such a name."""
    if isinstance(value, dict):
        return {key: redact(member, str(key)) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        if not _speaks_of_one(name) and all(isinstance(member, str) for member in value):
            return redact_words(value)
        return [redact(member, name) for member in value]
    if isinstance(value, str) and _speaks_of_one(name):
        return HIDDEN
    return value


def _speaks_of_one(name: str, pattern: re.Pattern[str] = _IN_A_NAME) -> bool:
    if name.isupper():
        return bool(_IN_CAPITALS.search(name))
    words = _BETWEEN_WORDS.sub("_", name).lower()
    return bool(pattern.search(words)) and not _NO_SECRET.search(words)


def redact_words(words: Sequence[str]) -> list[str]:
    """A command line without the secrets typed in it: `--hf-token XYZ`, `--api-key=XYZ`, `--env WANDB_API_KEY=XYZ`,
    `-genv HF_TOKEN XYZ`, `https://user:XYZ@host`, `--header "Authorization: Bearer XYZ"`, `sshpass -p XYZ`."""
    shown: list[str] = []
    options: tuple[str, ...] = ()
    is_secret = False
    for word in words:
        if is_secret and not word.startswith("-"):
            shown.append(HIDDEN)
            is_secret = False
            continue
        shown.append(_redact_word(word))
        options = _OPTIONS_OF.get(PurePath(word).name, options)
        is_secret = word in options or (bool(_NAMES_THE_NEXT.search(word)) and _speaks_last(word.removesuffix(":")))
    return shown


def _redact_word(word: str) -> str:
    whole = _WHOLE.match(word)
    if whole and _speaks_last(whole["name"]):
        return f"{whole['before']}{HIDDEN}"

    seen = 0

    def without_value(assigned: re.Match[str]) -> str:
        """The assignment with its value hidden if its name speaks of a secret, or if it is one too many."""
        nonlocal seen
        seen += 1
        if seen > _MOST_ASSIGNMENTS:
            return HIDDEN
        if not _speaks_last(assigned["name"]):
            # Its value may be an assignment itself: `--env=HF_TOKEN=XYZ`.
            return f"{assigned['name']}{assigned['by']}{_ASSIGNED.sub(without_value, assigned['value'])}"
        quote = assigned["value"][0] if assigned["value"][0] in "\"'" else ""
        return f"{assigned['name']}{assigned['by']}{quote}{HIDDEN}{quote}"

    return _hide_shapes(_ASSIGNED.sub(without_value, word))


def _speaks_last(name: str) -> bool:
    return _speaks_of_one(name.lstrip("-+"), _LAST_IN_A_NAME)


def _hide_shapes(text: str) -> str:
    text = _IN_URL.sub(rf"\1{HIDDEN}@", text)
    return _SHAPES.sub(HIDDEN, _BEARER.sub(rf"\1{HIDDEN}", text))


def secret_values(env: Mapping[str, str]) -> tuple[str, ...]:
    """The secrets in an environment, passwords in its URLs among them, longest first. Short values and paths are
    none."""
    named = {value for name, value in env.items() if _speaks_of_one(name)}
    in_urls = {found[2] for value in env.values() for found in _IN_URL.finditer(value)}
    return tuple(sorted((value for value in named | in_urls
                         if len(value) >= _LEAST_CHARACTERS and not value.startswith("/")), key=len, reverse=True))


def without_secrets(value: Any, env: Mapping[str, str]) -> Any:
    """`value` as it may be written down: redacted by names, and without the secrets of the environment `env`."""
    return hide(redact(value), secret_values(env))


def has_secret(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """True if a secret was typed in a command line, or one of the environment `env`."""
    return without_secrets(list(words), env) != list(words)


def hide(value: Any, secrets: Sequence[str]) -> Any:
    """`value` with each of the texts `secrets` in it, and all that looks like one, replaced by "[redacted]"."""
    if isinstance(value, dict):
        return {key: hide(member, secrets) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide(member, secrets) for member in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return _hide_shapes(value)
    return value
