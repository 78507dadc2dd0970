"""What this machine offers a run, and what to mend: one file a subject, one function a line (imports no torch)."""
