"""The names of the files that a run of ``vitrim train`` leaves in its folder.

`load_run`, of `vitrim.loading`, makes a model of that folder.
"""

from __future__ import annotations

from vitrim.loading import load_run
from vitrim.training.log import EVALUATIONS, UPDATES
from vitrim.weights import RECIPE, RESULT, WEIGHTS_FILE

__all__ = ["EVALUATIONS", "RECIPE", "RECORDS", "RESULT", "UPDATES", "WEIGHTS_FILE", "load_run"]

RECORDS = (RECIPE, RESULT, UPDATES, EVALUATIONS)
"""The files a run leaves besides weights."""
