"""Settings that meet a target, by a search over amounts per block, or by bisection over one option."""

from vitrim.tuning.cost import match_macs
from vitrim.tuning.result import ParetoFront, Result, Target
from vitrim.tuning.search import front, search
from vitrim.tuning.space import Space
from vitrim.tuning.tune import TuneReport

__all__ = ["ParetoFront", "Result", "Space", "Target", "TuneReport", "front", "match_macs", "search"]
