"""What every other room may rest on: private folders, and reading what comes from outside this process (standard
library only)."""
