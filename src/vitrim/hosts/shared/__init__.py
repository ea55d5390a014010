"""Parts that hosts of several libraries are made of."""
