"""`python kfp_local.py PIPELINE RUN_DIR`, in an environment with kfp: runs a pipeline by kfp's local runner."""

from __future__ import annotations

import runpy
import sys

from kfp import local

local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=f"{sys.argv[2]}.kfp")
runpy.run_path(sys.argv[1])["pipeline"](run_dir=sys.argv[2])
