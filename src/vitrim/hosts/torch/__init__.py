"""Tables: the file of this folder that knows each class of models; see `vitrim.hosts`.

PyTorch has no models, but parts that people write models with, which `own` reduces once a user describes the model.
"""

REFUSED: dict[str, str] = {
    "torch.nn.modules.transformer.TransformerEncoder": "own:UNDESCRIBED",
}
"""The reason why models of a class cannot be reduced."""
