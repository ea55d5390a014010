"""Selectors of image tokens inside vLLM, as a plugin.

vLLM gives a plugin no call between its settings and the model. So `plugin` stands in for the one place that makes a
model's configuration: it reads the setting, notes it there, and names an architecture of its own, which is a subclass
of vLLM's model with a processor that cuts placeholders. Without a setting nothing is named, and nothing changes; models
with and without one can share a process.

* `setting`: what was asked, whether it can work, how many placeholders stay. Needs no vLLM.
* `plugin`: the entry point of ``vllm.general_plugins``.
* `selecting`: model and processor, for any family.
* `llava`, `tiles`, `qwen`: the families.
"""
