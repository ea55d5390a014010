"""Measures of what a reduction does: patterns of tokens, maps of depth, similarity of features.

The metrics are pure functions of arrays in float64; `collect` gathers those arrays, with the measuring engine, into
`Record` objects.
"""
