"""The run directory: the only way in which one command tells another anything (standard library only)."""

from ezpz_llm.rundir.files import (
    RUN_DIR_VARIABLE,
    RunDir,
    append_line,
    append_lines,
    default_run_dir,
    newest_run,
    read_json,
    read_layout,
    read_lines,
    read_record,
    update_record,
    write_atomic,
    write_json,
)
from ezpz_llm.rundir.secrets import redact
from ezpz_llm.rundir.side_files import SideFiles

__all__ = [
    "RUN_DIR_VARIABLE",
    "RunDir",
    "SideFiles",
    "append_line",
    "append_lines",
    "default_run_dir",
    "newest_run",
    "read_json",
    "read_layout",
    "read_lines",
    "read_record",
    "redact",
    "update_record",
    "write_atomic",
    "write_json",
]
