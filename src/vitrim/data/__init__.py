"""Image datasets by name or path: `load_data`, `load_images`, `stream_images`.

Tables and archives need the optional package `datasets`, imported when one is opened. Missing, damaged or invalid data
raises `DataError`, in one line that names the file, row or image.
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
