"""Hosts and libraries of models: one folder per library, with one file per family of models.

``hosts/LIBRARY/__init__.py`` maps classes of models to files: ``"module.ClassName": "file:Name"``. (In transformers,
one entry per module: ``"vit": "file:Name ClassName ClassName"``.) A new family is a file and a line there. Only that
file is imported, on the first question about a model of the class or a subclass. The tables:

* ``HOSTS``: the `vitrim.core.host.Host` that reduces a model,
* ``VISION_LANGUAGE``: the `vitrim.core.host.VisionLanguage` of a whole vision-language model,
* ``SELECTED``: the same for models whose tower is not reduced, only selected behind,
* ``REFUSED``: why models of a class, or of a whole module, cannot be reduced, and what to use instead,
* ``LIBRARIES``: the `vitrim.core.library.Library` for all models of the library, or for those of a class,
* ``ON_REDUCE``: a function that `vitrim.reduce_` calls with the model if the key, a module of the library, is loaded.
"""
