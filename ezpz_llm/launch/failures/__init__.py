"""Why a run ended: records of failed ranks, which of them was the cause, and how it is told."""

from ezpz_llm.launch.failures.account import account, bare_account
from ezpz_llm.launch.failures.facts import Account, RunFacts, Stop, exit_record, not_started
from ezpz_llm.launch.failures.record import Failure, read_failures

__all__ = ["Account", "Failure", "RunFacts", "Stop", "account", "bare_account", "exit_record", "not_started",
           "read_failures"]
