"""Measures of what a reduction does: patterns of tokens, maps of depth, similarity of features, speed.

`vitrim.analysis.analyze` has the functions behind ``vitrim analyze``. Each file of `vitrim.analysis.families` is one
family: its metrics, which are pure functions of arrays in float64, its tables and its figures. `collect` gathers the
arrays, with the measuring engine, into `Record` objects.
"""
