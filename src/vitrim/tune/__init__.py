"""Settings that meet a target: by bisection over one option, or by a search over a value for every block."""

from vitrim.tune.front import Front
from vitrim.tune.match import match_macs
from vitrim.tune.result import Result, Target
from vitrim.tune.search import front, search
from vitrim.tune.space import Space

__all__ = ["Front", "Result", "Space", "Target", "front", "match_macs", "search"]
