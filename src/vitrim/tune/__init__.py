"""Settings that meet a target: by bisection over one option, or by a search over a value for every block."""

from vitrim.tune.match import match_macs
from vitrim.tune.search import Result, Target, search
from vitrim.tune.space import Space

__all__ = ["Result", "Space", "Target", "match_macs", "search"]
