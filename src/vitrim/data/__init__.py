"""Image datasets by name or path.

    dataset = load_images("cifar10-test.parquet")  # or a folder of parquet files, an image folder, "hfds/owner/name",
                                                   # or "imagenet:PATH", see vitrim.data.readers
    dataset.transform = eval_transform(model)      # the preprocessing that the model was evaluated with
    for images, labels in batches(dataset, 32, limit=1000):
        ...                                        # (B, C, H, W) float32, (B,) int64

`load_data` also opens datasets with several labels per image, masks, boxes or outlines; `stream_images` reads tables
that are too large to keep. Parquet files, Hub datasets and WebDataset archives need the optional package `datasets`
(`pip install 'vitrim[data]'`), which is imported when such a source is opened.

Missing, damaged or invalid data raises `DataError`, in one line that names the file, row or image.
"""

from vitrim.data.dataset import ImageDataset, MultiLabelDataset, batches, spread
from vitrim.data.decoding import to_tensor
from vitrim.data.dense import DetectionDataset, SegmentationDataset
from vitrim.data.load import load_data, load_images
from vitrim.data.objects import Boxes
from vitrim.data.readers import register_reader
from vitrim.data.streaming import ImageStream, stream_images
from vitrim.data.transforms import eval_transform
from vitrim.errors import DataError

__all__ = [
    "Boxes",
    "DataError",
    "DetectionDataset",
    "ImageDataset",
    "ImageStream",
    "MultiLabelDataset",
    "SegmentationDataset",
    "batches",
    "eval_transform",
    "load_data",
    "load_images",
    "register_reader",
    "spread",
    "stream_images",
    "to_tensor",
]
