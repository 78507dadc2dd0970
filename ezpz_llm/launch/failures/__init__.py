"""Why a run ended: records of failed ranks, which of them was the cause, and how it is told."""

from ezpz_llm.launch.failures.facts import Account, Failure, RunFacts, Stop, exit_record, not_started, read_failures
from ezpz_llm.launch.failures.postmortem import account, bare_account

__all__ = ["Account", "Failure", "RunFacts", "Stop", "account", "bare_account", "exit_record", "not_started",
           "read_failures"]
