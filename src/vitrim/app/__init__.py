"""A page in the browser: an image, a method, one slider, and what is left. ``vitrim app`` serves it."""
