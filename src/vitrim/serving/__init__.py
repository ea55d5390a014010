"""Selectors of image tokens inside servers of language models and harnesses that score them: one folder per package."""
