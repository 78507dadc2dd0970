"""From a `launch` command to a queued job: its script, its request, and what it does when it is started again."""
