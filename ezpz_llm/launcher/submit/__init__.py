"""Job scripts for `launch` commands: writing, submitting, and resuming them."""
