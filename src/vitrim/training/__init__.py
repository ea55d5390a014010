"""Training: recipes, the loop and the steps. ``vitrim train`` is the command; see docs/training.md.

Importing this package imports nothing heavy.
"""
