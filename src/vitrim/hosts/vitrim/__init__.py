"""Hosts of vitrim's own models, `vitrim.models`."""
