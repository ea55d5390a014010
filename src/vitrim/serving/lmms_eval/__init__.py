"""A model of lmms-eval, ``vitrim``, whose language model gets fewer image tokens (entry point ``lmms_eval.models``)."""
