"""Our own models, `vitrim.models`."""
