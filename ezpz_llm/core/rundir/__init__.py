"""Files of a run directory, through which all commands exchange data.

Standard library only, except for the modules of records, which this module does not import.
"""

from ezpz_llm.core.rundir.files import (
    RUN_DIR_VARIABLE,
    RunDir,
    append_line,
    append_lines,
    default_run_dir,
    hash_file,
    locked,
    private_opener,
    read_json,
    read_lines,
    remove_incomplete_checkpoints,
    write_atomic,
    write_file,
    write_json,
)
from ezpz_llm.core.rundir.newest import ANY, LAUNCHED, TRAINING, WITH_STEPS, newest_run
from ezpz_llm.core.rundir.secrets import has_secret, hide, redact, redact_words, secret_values, without_secrets
from ezpz_llm.core.rundir.side_files import SideFiles, ignore_print_errors

__all__ = [
    "ANY",
    "LAUNCHED",
    "RUN_DIR_VARIABLE",
    "TRAINING",
    "WITH_STEPS",
    "RunDir",
    "SideFiles",
    "append_line",
    "append_lines",
    "default_run_dir",
    "has_secret",
    "hash_file",
    "hide",
    "ignore_print_errors",
    "locked",
    "newest_run",
    "private_opener",
    "read_json",
    "read_lines",
    "redact",
    "redact_words",
    "remove_incomplete_checkpoints",
    "secret_values",
    "without_secrets",
    "write_atomic",
    "write_file",
    "write_json",
]
