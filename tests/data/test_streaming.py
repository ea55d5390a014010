"""Tables read from front to back."""

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

from image_files import encoded, picture, plain_images, write_plain, write_table, write_tree
from vitrim.data import DataError, ImageStream, stream_images


def write_parts(folder, parts: int = 2, rows: int = 5):
    """Files whose labels count up, over all of them."""
    for part in range(parts):
        numbers = list(range(part * rows, (part + 1) * rows))
        write_plain(folder / f"train-{part}.parquet", image=plain_images(rows), label=numbers)
    return folder


def seen(stream: ImageStream) -> list[int]:
    return [label for _, label in stream]


def test_reads_images_in_order(tmp_path):
    stream = stream_images(write_parts(tmp_path), split="train")
    assert (seen(stream), seen(stream)) == (list(range(10)), list(range(10)))
    assert (stream.length, stream.class_names, stream.split) == (10, None, "train")
    image, label = next(iter(stream))
    assert (image.shape, image.dtype, type(label)) == ((3, 4, 6), torch.float32, int)


def test_class_names_and_transform(tmp_path):
    stream = stream_images(write_table(tmp_path / "x.parquet", [2, 0]))
    stream.mode, stream.transform = "L", lambda image: torch.tensor(image.getbands() == ("L",))
    assert stream.class_names == ["cat", "dog", "eel"]
    assert [(bool(grey), label) for grey, label in stream] == [(True, 2), (True, 0)]


def test_order_depends_on_seed_and_epoch_alone(tmp_path):
    folder = write_parts(tmp_path, parts=4)
    orders = {}
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        stream, again = (stream_images(folder).shuffled(seed, buffer=8) for _ in range(2))
        stream.set_epoch(epoch)
        seen(again)  # what was read before does not count
        again.set_epoch(epoch)
        orders[seed, epoch] = seen(stream)
        assert seen(again) == orders[seed, epoch]
        assert sorted(orders[seed, epoch]) == list(range(20))
    assert len({tuple(order) for order in orders.values()}) == 3


@pytest.mark.parametrize("files", [4, 3])
def test_parts_are_disjoint_and_complete(tmp_path, files):
    folder = write_parts(tmp_path, parts=files)
    parts = [seen(stream_images(folder).shuffled(0, buffer=8).part(rank, 2)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(5 * files))
    assert abs(len(parts[0]) - len(parts[1])) <= 1
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), not 2"):
        stream_images(folder).part(2, 2)


@pytest.mark.parametrize("images", [0, 1, 7, 10])
def test_goes_on_where_it_stopped(tmp_path, images):
    folder = write_parts(tmp_path, parts=4)

    def stream() -> ImageStream:
        return stream_images(folder).shuffled(3, buffer=8).part(1, 2)

    whole, resumed = stream(), stream()
    whole.set_epoch(2)
    resumed.resume(epoch=2, images=images)
    assert seen(resumed) == seen(whole)[images:]
    for each in (whole, resumed):
        each.set_epoch(3)
    assert seen(resumed) == seen(whole)


def test_images_left_out_are_not_decoded(tmp_path):
    rows = [{"bytes": value, "path": None} for value in (b"nonsense", encoded(picture()))]
    stream = stream_images(write_plain(tmp_path / "x.parquet", image=rows, label=[0, 1]))
    stream.resume(0, 1)
    assert seen(stream) == [1]
    stream.resume(0, 0)
    with pytest.raises(DataError, match=r"cannot read image 0 of .*x.parquet: not an image of a known format$"):
        seen(stream)


def test_workers_share_the_files(tmp_path, monkeypatch):
    stream = stream_images(write_parts(tmp_path))
    labels = [label for _, batch in DataLoader(stream, 2, num_workers=2) for label in batch.tolist()]
    assert sorted(labels) == list(range(10))
    stream.resume(0, 3)
    monkeypatch.setattr("vitrim.data.streaming.get_worker_info", lambda: "this is a worker")
    with pytest.raises(DataError, match=r"cannot go on after 3 images of .* with workers: set workers=0$"):
        seen(stream)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, None], r"the label of row 1 of .* is None; valid: integers >= 0"),
        ([0, -1], r"the label of row 1 of .* is -1; valid: integers >= 0"),
    ],
)
def test_labels_that_do_not_serve(tmp_path, values, message):
    stream = stream_images(write_plain(tmp_path / "x.parquet", image=plain_images(2), label=values))
    with pytest.raises(DataError, match=message):
        seen(stream)


def test_sources_that_do_not_serve(tmp_path):
    with pytest.raises(DataError, match="has an empty name: name one, or leave it out"):
        stream_images(tmp_path, split="")
    with pytest.raises(DataError, match="has no parquet files: only tables and Hub datasets can be streamed"):
        stream_images(write_tree(tmp_path / "tree", "a/0.png"))
    with pytest.raises(DataError, match=r"labels of .* are texts \(column 'label'\): a stream needs integers"):
        stream_images(write_plain(tmp_path / "x.parquet", image=plain_images(1), label=["cat"]))


def test_the_hub(tmp_path, monkeypatch):
    file = str(write_table(tmp_path / "x.parquet", [2, 0]))
    asked = []

    def load_dataset(name, *, split, streaming):
        asked.append((name, split, streaming))
        return loaded("parquet", data_files={"validation": file}, split=split, streaming=streaming)

    loaded = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "validation"])
    stream = stream_images("hfds/owner/name")
    assert (seen(stream), stream.split, stream.source) == ([2, 0], "validation", "hfds/owner/name")
    assert asked == [("owner/name", "validation", True)]


def test_a_label_beyond_the_class_names_is_refused(tmp_path):
    """`datasets` does not check them in a file that another program wrote."""
    stream = stream_images(write_table(tmp_path / "x.parquet", [2, 0]))
    row = next(iter(stream.encoded(0)))
    assert stream.decode(row, 0)[1] == 2
    for label in (3, -1):
        with pytest.raises(
            DataError, match=rf"^the label of row 0 of .* is {label}; valid: 0 to 2, one per class name"
        ):
            stream.decode({**row, "label": label}, 0)
