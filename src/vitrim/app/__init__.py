"""The browser app of ``vitrim app``: the remaining tokens of an image under a method."""
