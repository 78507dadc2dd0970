"""Turn text into token shards; verify and show them; provide a tokenizer's file."""

from ezpz_llm.base.errors import run_command
from ezpz_llm.data.commands import main

if __name__ == "__main__":
    raise SystemExit(run_command(main))
