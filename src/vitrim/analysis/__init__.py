"""Measures of what a reduction does: patterns of kept tokens, depth maps, similarity of features, speed.

Each file of `vitrim.analysis.families` is one family: its metrics (pure float64 functions of arrays), its tables and
its figures.
"""
