"""The model's preprocessing."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from image_files import encoded, picture
from vitrim.data import DataError, ImageDataset, eval_transform


def test_eval_transform_is_that_of_the_model():
    model = timm.create_model("test_vit")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8))
    expected = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))(image)
    torch.testing.assert_close(eval_transform(model)(image), expected, rtol=0, atol=0)
    assert eval_transform(timm.create_model("test_vit", img_size=(64, 96)))(image).shape == (3, 64, 96)
    assert eval_transform(model)(image.convert("RGBA")).shape == expected.shape


@pytest.mark.parametrize(("channels", "mean", "std"), [(3, (0.1, 0.2, 0.3), (0.4, 0.5, 0.9)), (1, (0.2,), (0.6,))])
def test_eval_transform_subtracts_the_mean_and_divides_by_the_deviation(channels, mean, std):
    """Other numbers than those of timm's test models, whose means and deviations are all 0.5."""
    overlay = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.9)}
    model = timm.create_model("test_vit", in_chans=channels, pretrained_cfg_overlay=overlay)
    colour = (200, 100, 50) if channels == 3 else (120, 120, 120)
    found = eval_transform(model)(Image.new("RGB", (160, 160), colour))
    expected = [(value / 255 - m) / s for value, m, s in zip(colour, mean, std, strict=False)]
    expected = torch.tensor(expected)[:, None, None].expand(channels, 160, 160)
    torch.testing.assert_close(found, expected)


def test_eval_transform_of_a_class_called_directly():
    model = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=8, depth=1, num_heads=1)
    assert eval_transform(model)(picture()).shape == (3, 32, 32)


def test_eval_transform_of_one_channel():
    model = timm.create_model("test_vit", in_chans=1)
    dataset = ImageDataset([encoded(picture(255).convert("L"))], [0], transform=eval_transform(model))
    image, _ = dataset[0]
    mean, std = (np.mean(model.pretrained_cfg[name]) for name in ("mean", "std"))
    grey = picture(255).convert("L").getpixel((0, 0)) / 255
    torch.testing.assert_close(
        image, torch.full((1, 160, 160), (grey - mean) / std), rtol=0, atol=1e-5, check_dtype=False
    )


def test_models_that_do_not_say():
    with pytest.raises(DataError, match="Linear does not say how its images are prepared"):
        eval_transform(nn.Linear(1, 1))
    with pytest.raises(DataError, match="takes 4 channels"):
        eval_transform(timm.create_model("test_vit", in_chans=4))
