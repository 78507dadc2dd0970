"""Secrets typed in command lines or set in the environment are not written down."""

from __future__ import annotations

from ezpz_llm.rundir import redact
from ezpz_llm.rundir.secrets import hide, redact_words, secret_values


def test_secrets_in_command_lines() -> None:
    secret = ["--env", "WANDB_API_KEY=abc", "-genv", "HF_TOKEN", "abc", "--hf-token", "abc", "--api-key=abc",
              "--password", "abc", "https://me:abc@host/x", "sh -c HF_TOKEN=abc"]
    assert redact_words(secret) == [
        "--env", "WANDB_API_KEY=[redacted]", "-genv", "HF_TOKEN", "[redacted]", "--hf-token", "[redacted]",
        "--api-key=[redacted]", "--password", "[redacted]", "https://me:[redacted]@host/x",
        "sh -c HF_TOKEN=[redacted]"]
    plain = ["python3", "x.py", "--eos-token", "5", "--max-tokens", "7", "--num-key-value-heads", "8",
             "--tokenizer", "gpt2", "-x", "A=1", "n1=2,KEYS", "--token-file", "f"]
    assert redact_words(plain) == plain
    assert redact({"typed": secret, "n": [1, 2], "steps": ("a", "b"), "my_token": "abc"}) == {
        "typed": redact_words(secret), "n": [1, 2], "steps": ["a", "b"], "my_token": "[redacted]"}


def test_secrets_of_the_environment() -> None:
    env = {"HF_TOKEN": "hf_12345678", "TOKENIZERS_PARALLELISM": "falsehood", "SSH_KEY": "/home/me/key", "KEY": "x"}
    assert secret_values(env) == ("hf_12345678",)
    assert hide({"a": ["see hf_12345678!"], "b": 1}, secret_values(env)) == {"a": ["see [redacted]!"], "b": 1}
