"""Image datasets by name or path.

    dataset = load_images("cifar10-test.parquet")  # or a folder of parquet files, an image folder, "hfds/owner/name"
    dataset.transform = eval_transform(model)      # what the model was evaluated with
    for images, labels in batches(dataset, 32, limit=1000):
        ...                                        # (B, C, H, W) float32, (B,) int64

Parquet files and Hub datasets are read with the optional package `datasets` (`pip install 'vitrim[data]'`), which is
imported only when such a source is opened.
"""

from vitrim.data.dataset import DataError, ImageDataset, batches, eval_transform, load_images, to_tensor

__all__ = ["DataError", "ImageDataset", "batches", "eval_transform", "load_images", "to_tensor"]
