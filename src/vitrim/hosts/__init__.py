"""Hosts and libraries of models: one folder per library, named like it; in it one file per family of models.

``hosts/LIBRARY/__init__.py`` is the table of the folder: where to find what belongs to a class of models, written
``"module.ClassName": "file:Name"`` (in transformers' for all classes of a module at once:
``"vit": "file:Name ClassName ClassName"``). A new family is a file and a line there. Only the file that is named is
imported, when a model of the class, or of one derived from it, is first asked about; so nobody pays for a library that
is not used. The tables:

* ``HOSTS``: the `vitrim.core.host.Host` that a model is reduced by,
* ``VISION_LANGUAGE``: the `vitrim.core.host.VisionLanguage` of a whole vision-language model,
* ``REFUSED``: the reason why models of a class, or of a whole module, cannot be reduced, and what to use instead,
* ``LIBRARIES``: the `vitrim.core.library.Library` that answers what training and measuring ask, for all models of the
  library by its name, or for those of a class,
* ``ON_REDUCE``: a function of the model that `vitrim.reduce_` calls where a module of the library, the key, is loaded.
"""
