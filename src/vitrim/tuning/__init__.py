"""Settings that meet a target, by a search over amounts per block, or by bisection over one option."""

from vitrim.tuning.result import Result, Target
from vitrim.tuning.space import Space
from vitrim.tuning.tune import TuneReport

__all__ = ["Result", "Space", "Target", "TuneReport"]
