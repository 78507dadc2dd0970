"""Tests of the redaction of secrets in command lines, settings and the environment."""

from __future__ import annotations

import pytest

from ezpz_llm.core.rundir import redact
from ezpz_llm.core.rundir.secrets import hide, redact_words, secret_values

SECRET = "s3cr3t-Value_42"


def test_secrets_in_command_lines() -> None:
    secret = ["--env", "WANDB_API_KEY=abc", "-genv", "HF_TOKEN", "abc", "--hf-token", "abc", "--api-key=abc",
              "--password", "abc", "https://me:abc@host/x", "sh -c HF_TOKEN=abc"]
    assert redact_words(secret) == [
        "--env", "WANDB_API_KEY=[redacted]", "-genv", "HF_TOKEN", "[redacted]", "--hf-token", "[redacted]",
        "--api-key=[redacted]", "--password", "[redacted]", "https://me:[redacted]@host/x",
        "sh -c HF_TOKEN=[redacted]"]
    plain = ["python3", "x.py", "--eos-token", "5", "--max-tokens", "7", "--num-key-value-heads", "8",
             "--tokenizer", "gpt2", "-x", "A=1", "n1=2,KEYS", "--token-file", "f", "--text-key", "content"]
    assert redact_words(plain) == plain
    assert redact({"typed": secret, "n": [1, 2], "steps": ("a", "b"), "my_token": "abc"}) == {
        "typed": redact_words(secret), "n": [1, 2], "steps": ["a", "b"], "my_token": "[redacted]"}
    assert redact({"text_key": "content"}) == {"text_key": "content"}


def test_secrets_in_the_environment() -> None:
    env = {"HF_TOKEN": "hf_12345678", "TOKENIZERS_PARALLELISM": "falsehood", "SSH_KEY": "/home/me/key", "KEY": "x"}
    assert secret_values(env) == ("hf_12345678",)
    assert hide({"a": ["see hf_12345678!"], "b": 1}, secret_values(env)) == {"a": ["see [redacted]!"], "b": 1}


@pytest.mark.parametrize("words", [
    ["--auth", SECRET], ["--auth", SECRET, "--lr", "3"], [f"--auth={SECRET}"], ["--registry-pass", SECRET],
    ["curl", "--header", f"Authorization: Bearer {SECRET}"], ["curl", "-H", f"X-Api-Key: {SECRET}"],
    [f"password: {SECRET}"], ["password:", SECRET], [f"hf_token={SECRET}"], [f"+trainer.hub.hf_token={SECRET}"],
    ["sh", "-c", f"HF_TOKEN={SECRET} LR=3 python3 train.py"],
    ["sh", "-c", f"LR=3 hf_token='{SECRET}' python3 x.py"],
    ["--set", f'{{"api_key": "{SECRET}", "lr": 3}}'], ["--set", f"apiKey={SECRET}"], [f"--env=DS_AUTH={SECRET}"],
    [f"TORCH_PASS={SECRET}"], ["-genv", "EZPZ_LLM_AUTH", SECRET], [f"postgres://me:{SECRET}@host/runs"],
    ["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"], ["--note", "sk-proj-aAbBcCdDeEfFgGhHiIjJkK"],
    ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.aAbBcCdDeEfF"], ["curl -H 'authorization: bearer aAbBcCdDeEfF'"],
])
def test_secret_in_a_command_line_is_hidden(words: list[str]) -> None:
    shown = " ".join(redact_words(words))
    assert "[redacted]" in shown
    assert not any(part in shown for part in (SECRET, "aAbBcCdDeEfF"))


@pytest.mark.parametrize("words", [
    ["python3", "-m", "http.server", "-p", "8000"], ["ssh", "-p", "2222", "n1"], ["--passes", "3"],
    ["--tokens_per_second", "5"], ["tokens_per_second=5"], ["--tokenizer=gpt2", "tokenizer=bytes"],
    ["token", "list"],
    ["text_key=content", "data.eos_token=<|end|>"], ["n1:2,n2:2"], ["--optimizer", "adamw"], ["--keep-last", "3"],
    ["--author", "ann", "author=ann"], ["--bypass", "x"], ["sh", "-c", "echo a: b, c=d; date"], ["--monkeys=3"],
])
def test_other_words_are_shown(words: list[str]) -> None:
    assert redact_words(words) == words


def test_redaction_by_name() -> None:
    hidden = {"hf_token": "x", "apiKey": "x", "Authorization": "x", "db.password": "x", "DS_AUTH": "x",
              "TORCH_PASS": "x", "EZPZ_LLM_AUTH": "x", "MY_APIKEY": "x"}
    assert set(redact(hidden).values()) == {"[redacted]"}
    shown = {"tokens_per_second": "x", "tokenizer": "x", "text_key": "x", "eos_token": "x", "forward_pass_s": "x",
             "auth_method": "x", "AUTHOR": "x", "SSH_AUTH_SOCK": "x", "TOKENIZERS_PARALLELISM": "x", "PWD": "/home",
             "OLDPWD": "/home"}
    assert redact(shown) == shown
