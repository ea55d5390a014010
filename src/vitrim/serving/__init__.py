"""Selectors of image tokens inside servers of language models: one folder per server."""
