"""Run one of PBS's commands: HOME NAME ARGUMENTS…"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pbs_standin.commands import pbsnodes, qdel, qstat
from pbs_standin.qsub import qsub
from pbs_standin.state import Home

commands = {"qsub": qsub, "qstat": qstat, "qdel": qdel, "pbsnodes": pbsnodes}
sys.exit(commands[sys.argv[2]](Home(Path(sys.argv[1])), sys.argv[3:]))
