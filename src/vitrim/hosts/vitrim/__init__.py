"""Tables of the folder; see `vitrim.hosts`."""

HOSTS: dict[str, str] = {
    "vitrim.models.segmenter.Segmenter": "dense:DenseHost",
    "vitrim.models.vitdet.Detector": "dense:DenseHost",
    "vitrim.models.lv_vit.LVViT": "lv_vit:LVViTHost",
    "vitrim.models.t2t_vit.T2TViT": "t2t_vit:T2TViTHost",
    "vitrim.models.windowed.WindowedEva": "windowed:WindowedTrunk",
    "vitrim.models.windowed.WindowedViT": "windowed:WindowedTrunk",
}

LIBRARIES: dict[str, str] = {
    "vitrim": "library:OwnLibrary",
    "vitrim.models.segmenter.Segmenter": "dense:DenseLibrary",
    "vitrim.models.vitdet.Detector": "dense:DenseLibrary",
    "vitrim.models.windowed.WindowedEva": "windowed:WindowedLibrary",
    "vitrim.models.windowed.WindowedViT": "windowed:WindowedLibrary",
}
