"""Turn text into token shards; verify and show them; provide a tokenizer's file."""

from ezpz_llm.data.commands import main
from ezpz_llm.errors import run_command

if __name__ == "__main__":
    raise SystemExit(run_command(main))
