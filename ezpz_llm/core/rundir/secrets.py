"""Redaction of secrets in records and command lines, by the names of variables, options and settings.

A name is secret if it contains a word such as token, key or password: `HF_TOKEN`, `db_password`, `--api-key`,
`Authorization`. In upper case, as in environment variables, part of a word is enough (`APIKEY`). Otherwise only
whole words match, so that `tokens_per_second` and `tokenizer` keep their values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_HIDDEN = "[redacted]"

_IN_CAPITALS = re.compile(
    r"TOKEN(?!IZER)|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(^|_)AUTHORIZATION|(^|_)(AUTH|PASS|JWT|PAT)$|_PWD$")
_WORDS = r"token|key|secret|password|passwd|passphrase|credentials?|authorization"
# Only at the end of a name: `forward_pass_s` and `auth_method` are not secret.
_LAST_WORDS = rf"{_WORDS}|auth|pass|pwd|jwt|pat"
_IN_A_NAME = re.compile(rf"(^|_)({_WORDS})(_|$)|(^|_)({_LAST_WORDS})$")
# Command lines contain names of model settings too (--num-key-value-heads), so only the last word decides there.
_LAST_IN_A_NAME = re.compile(rf"(^|_)({_LAST_WORDS})$")
_NOT_SECRET = re.compile(r"(^|_)((eos|bos|pad|unk|sep|cls|mask|special)_token|text_key)$")
"""Settings that are not secret although their names contain a secret word."""
_BETWEEN_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[-.\s]")

_ASSIGNMENT = re.compile(
    r"""(?<![\w.-])(?P<name>[-+]{0,2}[A-Za-z_][\w.-]*)
        (?P<by>=|["']\s*:\s*|:\s+)
        (?P<value>"[^"]*"|'[^']*'|(?<==)[^\s,;&"']+|(?<!=)[^\s,}"'][^,}\n"']*)""", re.VERBOSE)
"""Assignment `NAME=value`, `name: value` or `"name": "value"` anywhere in a text."""
_SINGLE_ASSIGNMENT = re.compile(r"^(?P<before>[-+]{0,2}(?P<name>[A-Za-z_][\w.-]*)=).+$", re.DOTALL)
"""Word that is a single assignment, with any value."""
_NAME_BEFORE_VALUE = re.compile(r"^(?:-[^=]*|[A-Z0-9_]+|[\w.-]+:)$")
"""Word whose value is the next word: `--password`, `HF_TOKEN` or `password:`. A plain `token` may be a command."""
_IN_URL = re.compile(r"(://[^/:@\s]+:)([^/@\s]+)@")
_TOKEN_FORMATS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)")
"""Tokens in the formats of Hugging Face, OpenAI, GitHub, GitLab, Slack and AWS, and JSON Web Tokens."""
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_MIN_CHARACTERS = 8
_MAX_ASSIGNMENTS = 200
"""Limit on assignments in one word, since they may be nested. Further assignments are redacted completely."""


def redact(value: Any, name: str = "") -> Any:
    """Return `value` with secrets replaced by "[redacted]".

    Redacts strings stored under a secret key. In lists of strings (command lines), redacts the values of options
    and variables with a secret name.
    """
    if isinstance(value, dict):
        return {key: redact(member, str(key)) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        if not _is_secret_name(name) and all(isinstance(member, str) for member in value):
            return redact_words(value)
        return [redact(member, name) for member in value]
    if isinstance(value, str) and _is_secret_name(name):
        return _HIDDEN
    return value


def _is_secret_name(name: str, pattern: re.Pattern[str] = _IN_A_NAME) -> bool:
    if name.isupper():
        return bool(_IN_CAPITALS.search(name))
    snake_case = _BETWEEN_WORDS.sub("_", name).lower()
    return bool(pattern.search(snake_case)) and not _NOT_SECRET.search(snake_case)


def redact_words(words: Sequence[str]) -> list[str]:
    """Return a command line without its secrets.

    Examples: `--hf-token XYZ`, `--api-key=XYZ`, `--env WANDB_API_KEY=XYZ`, `-genv HF_TOKEN XYZ`,
    `https://user:XYZ@host`, `--header "Authorization: Bearer XYZ"`.
    """
    redacted: list[str] = []
    is_secret = False
    for word in words:
        if is_secret and not word.startswith("-"):
            redacted.append(_HIDDEN)
            is_secret = False
            continue
        redacted.append(_redact_word(word))
        is_secret = bool(_NAME_BEFORE_VALUE.search(word)) and _ends_in_secret_word(word.removesuffix(":"))
    return redacted


def _redact_word(word: str) -> str:
    whole = _SINGLE_ASSIGNMENT.match(word)
    if whole and _ends_in_secret_word(whole["name"]):
        return f"{whole['before']}{_HIDDEN}"

    count = 0

    def without_value(assigned: re.Match[str]) -> str:
        """Return the assignment without its value if its name is secret; redact all of it beyond the limit."""
        nonlocal count
        count += 1
        if count > _MAX_ASSIGNMENTS:
            return _HIDDEN
        if not _ends_in_secret_word(assigned["name"]):
            # The value may be an assignment itself: `--env=HF_TOKEN=XYZ`.
            return f"{assigned['name']}{assigned['by']}{_ASSIGNMENT.sub(without_value, assigned['value'])}"
        quote = assigned["value"][0] if assigned["value"][0] in "\"'" else ""
        return f"{assigned['name']}{assigned['by']}{quote}{_HIDDEN}{quote}"

    return _hide_tokens(_ASSIGNMENT.sub(without_value, word))


def _ends_in_secret_word(name: str) -> bool:
    return _is_secret_name(name.lstrip("-+"), _LAST_IN_A_NAME)


def _hide_tokens(text: str) -> str:
    text = _IN_URL.sub(rf"\1{_HIDDEN}@", text)
    return _TOKEN_FORMATS.sub(_HIDDEN, _BEARER.sub(rf"\1{_HIDDEN}", text))


def secret_values(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secrets in an environment, including passwords in URLs, longest first.

    Values of fewer than 8 characters, or beginning with /, are not treated as secrets.
    """
    by_name = {value for name, value in env.items() if _is_secret_name(name)}
    in_urls = {match[2] for value in env.values() for match in _IN_URL.finditer(value)}
    return tuple(sorted((value for value in by_name | in_urls
                         if len(value) >= _MIN_CHARACTERS and not value.startswith("/")), key=len, reverse=True))


def without_secrets(value: Any, env: Mapping[str, str]) -> Any:
    """Return `value` with secrets redacted: by name, by format, and if they are values in `env`."""
    return hide(redact(value), secret_values(env))


def has_secret(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return True if `without_secrets` would redact a part of a command line."""
    return without_secrets(list(words), env) != list(words)


def hide(value: Any, secrets: Sequence[str]) -> Any:
    """Return `value` with each of `secrets`, and all tokens in a known format, replaced by "[redacted]"."""
    if isinstance(value, dict):
        return {key: hide(member, secrets) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide(member, secrets) for member in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, _HIDDEN)
        return _hide_tokens(value)
    return value
