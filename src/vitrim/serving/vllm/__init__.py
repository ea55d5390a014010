"""Selectors of image tokens inside vLLM, as a plugin.

vLLM calls a plugin at no point between its settings and the model. So `plugin` replaces the one function that creates a
model's configuration: it reads the setting, stores it there, and names its own architecture, a subclass of vLLM's model
with a processor that cuts placeholders. Without a setting nothing changes; models with and without one can share a
process.

* `setting`: the requested selector, its validity, and the number of placeholders. Needs no vLLM.
* `plugin`: the entry point of ``vllm.general_plugins``.
* `selecting`: model and processor, for any family.
* `llava`, `tiles`, `qwen`: the families.
"""
