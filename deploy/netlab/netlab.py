#!/usr/bin/env python3
"""`python deploy/netlab/netlab.py profiles | calibrate PROFILE | run PROFILE -- CMD`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # the folder of a script is on the path, but `netlab` must mean the folder here, not this file
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from netlab.cli import main

    sys.exit(main())
