"""Tables of the folder; see `vitrim.hosts`.

PyTorch has no models of its own, but parts of users' models, which `own` reduces once a user describes the model.
"""

REFUSED: dict[str, str] = {"torch.nn.modules.transformer.TransformerEncoder": "own:UNDESCRIBED"}
