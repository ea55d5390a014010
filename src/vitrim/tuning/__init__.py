"""Settings that meet a target: by bisection over one option, or by a search over a value for every block."""

from vitrim.tuning.front import Front
from vitrim.tuning.match import match_macs
from vitrim.tuning.result import Result, Target
from vitrim.tuning.search import front, search
from vitrim.tuning.space import Space

__all__ = ["Front", "Result", "Space", "Target", "front", "match_macs", "search"]
