"""Selectors of image tokens inside vLLM, as a plugin (``vllm.general_plugins``).

vLLM calls a plugin at no point between its settings and the model. So `plugin` replaces the one function that creates a
model's configuration: it reads the `setting`, stores it there, and names its own architecture, a subclass of vLLM's
model with a processor that cuts placeholders (`selecting`). Without a setting nothing changes.
"""
