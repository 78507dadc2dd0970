"""What is particular to a machine, as data: one TOML file a site in `launchers/sites/`."""

from ezpz_llm.launch.sites.file import find_site
from ezpz_llm.launch.sites.site import Job, Site

__all__ = ["Job", "Site", "find_site"]
