"""Models of transformers from folders and from the hub's cache, with the preprocessing of their image processors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from classwise.core.errors import InputError
from classwise.models.hub import prepared
from classwise.models.load import build_model, load_model
from classwise.models.preprocess import Resize
from each import for_each

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny transformer with four classes and its processor, as transformers saves them."""
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=4)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    size = {"height": 16, "width": 16}
    mean, std = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
    transformers.ViTImageProcessor(size=size, image_mean=mean, image_std=std, resample=3).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Noise of medium contrast: where bicubic overshoots 0 or 255, Pillow cuts off between the two directions too."""
    values = np.random.default_rng(seed).integers(64, 192, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def in_unit_range(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255


class Seen(nn.Module):
    """Returns its flattened input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


def test_folder_gives_the_logits_of_transformers(saved):
    model = load_model(f"hf:{saved}", num_classes=4)
    assert not model.training
    processor = transformers.AutoImageProcessor.from_pretrained(saved)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(saved).eval()
    image = picture(16, 16)  # of the model's size, so that nothing is rounded to 8 bits in between
    with torch.no_grad():
        wanted = theirs(processor(image, return_tensors="pt")["pixel_values"]).logits
        assert torch.allclose(model(in_unit_range(image)), wanted, atol=1e-5)


@for_each("shape", [(40, 40), (12, 12), (23, 31), (31, 23)], ids=str)
@for_each(
    ("kind", "settings"),
    [
        ("ViTImageProcessor", {"size": {"height": 16, "width": 20}, "resample": 2}),
        ("ViTImageProcessor", {"size": {"height": 16, "width": 16}, "resample": 3}),
        ("ViTImageProcessor", {"size": {"height": 16, "width": 16}, "resample": 0}),
        ("ViTImageProcessor", {"size": {"height": 16, "width": 16}, "do_normalize": False}),
        ("ViTImageProcessor", {"size": {"height": 16, "width": 16}, "rescale_factor": 1 / 127.5}),
        ("ViTImageProcessor", {"do_resize": False, "do_rescale": False}),
        ("CLIPImageProcessor", {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 18}}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 14}, "crop_pct": 0.875}),
        ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
    ],
)
def test_preprocessing_equals_the_image_processor(kind, settings, shape):
    """Up to Pillow's rounding to 8 bits, half a level after each of the two directions.

    The second direction may stretch what the first has rounded by the sum of its absolute weights: 1 where they are
    positive, 1.25 for bicubic (-1/16, 9/16, 9/16, -1/16).
    """
    processor = getattr(transformers, kind)(**settings)
    image = picture(*shape)
    wanted = torch.as_tensor(np.array(processor(image, return_tensors="np")["pixel_values"]))
    own = prepared(Seen(), processor.to_dict())
    got = own(in_unit_range(image)).reshape(wanted.shape)
    level = float((1 / 255 / own.normalize.std).max())
    levels = 0.5 * (1.25 if processor.resample == 3 else 1) + 0.5
    assert torch.allclose(got, wanted, rtol=1e-5, atol=(1.01 * levels * level if processor.do_resize else 1e-4))
    assert float(wanted.std()) > 3 * level  # the tolerance is small relative to the compared values


def test_gradient_passes_through_preprocessing(saved):
    x = torch.rand(2, 3, 40, 40, requires_grad=True)
    load_model(f"hf:{saved}")(x).sum().backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any())


def test_folder_with_another_number_of_classes(saved):
    with pytest.raises(InputError, match="has 4 classes, but the data has 10"):
        load_model(f"hf:{saved}", num_classes=10)
    with pytest.raises(InputError, match="includes its weights"):
        load_model(f"hf:{saved}", weights="x.pt")
    with pytest.raises(InputError, match="can be evaluated, but not built without them"):
        build_model(f"hf:{saved}")


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("config.json", {"num_hidden_layers": 2}, "16 weights are missing or have other shapes"),
        ("config.json", {"model_type": "nobody"}, "is not an image classifier that transformers can load"),
        ("preprocessor_config.json", {"resample": 1}, "resampling 'lanczos' is not supported"),
        ("preprocessor_config.json", {"do_flip_channel_order": True}, "has do_flip_channel_order"),
        ("preprocessor_config.json", {"size": {"height": 10**9, "width": 8}}, "expected sides from 1 to 4096"),
        ("preprocessor_config.json", {"size": {"height": "x", "width": 8}}, "cannot be read"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, "one number per channel"),
        ("preprocessor_config.json", {"image_std": [0.0, 0.1, 0.1]}, "positive standard deviations"),
    ],
)
def test_invalid_folders(copy, file, changes, said):
    change(copy / file, **changes)
    with pytest.raises(InputError) as caught:
        load_model(f"hf:{copy}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("vit", {"num_hidden_layers": 1_000_000}, "describes a far larger model than its weights"),
        ("vit", {"hidden_size": 1_000_000}, "describes a far larger model than its weights"),
        ("vit", {"hidden_size": 10**7}, "'hidden_size' is larger than"),
        ("vit", {"id2label": None, "num_labels": 10**12}, "'num_labels' is larger than"),
        ("vit", {"vision_config": {"num_labels": 10**12}}, "'num_labels' is larger than"),
        ("vit", {"hidden_sizes": [10**6] * 500}, "'hidden_sizes' is larger than"),
        ("vit", {"hidden_sizes": [0] * 100_000}, "'hidden_sizes' is larger than"),
        ("swin", {"window_size": 3000}, "describes a far larger model than its weights"),
        ("convnext", {"depths": [500_000, 1, 1, 1]}, "describes a far larger model than its weights"),
        ("efficientnet", {"depth_coefficient": 1e9}, "describes a far larger model than its weights"),
        ("levit", {"patch_size": 1}, "a LeViT with more than"),
    ],
    ids=str,
)
def test_oversized_configurations_are_refused(copy, kind, changes, said):
    content = {} if kind != "vit" else json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**content, "model_type": kind, **changes}))
    began = time.monotonic()
    with pytest.raises(InputError) as caught:
        load_model(f"hf:{copy}")
    assert time.monotonic() - began < 10  # their requests take minutes or all memory
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_size_limit_ends_with_its_context(copy, saved):
    change(copy / "config.json", num_hidden_layers=1_000_000)
    with pytest.raises(InputError, match="far larger model"):
        load_model(f"hf:{copy}")
    assert len(nn.Sequential(*(nn.Identity() for _ in range(2000)))) == 2000
    assert load_model(f"hf:{saved}")(torch.rand(1, 3, 16, 16)).shape == (1, 4)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '"text"', "{}", '{"a": ' + "1" * 5000 + "}"])
def test_files_that_are_not_configurations(copy, content):
    (copy / "config.json").write_text(content)
    with pytest.raises(InputError):
        load_model(f"hf:{copy}")


def test_code_of_a_repository_is_not_executed(copy):
    trace = copy / "trace"
    (copy / "evil.py").write_text(f"open({str(trace)!r}, 'w')\n")
    change(
        copy / "config.json",
        model_type="evil",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForImageClassification": "evil.Model"},
    )
    change(copy / "preprocessor_config.json", auto_map={"AutoImageProcessor": "evil.Processor"})
    with pytest.raises(InputError, match="is not an image classifier that transformers can load"):
        load_model(f"hf:{copy}")
    change(copy / "config.json", schema="classwise/model/1", architecture=f"{copy / 'evil.py'}:make")
    change(copy / "config.json", num_classes=1, in_channels=1, classes=["a"])
    with pytest.raises(InputError, match="is unknown; expected a name from classwise list models"):
        load_model(f"hf:{copy}")
    assert not trace.exists()


def test_pickled_weights_are_not_read(copy):
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"no file named model\.safetensors"):
        load_model(f"hf:{copy}")


def test_hub_cache_works_offline(saved, tmp_path):
    cache = tmp_path / "models--org--tiny"
    shutil.copytree(saved, cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    code = (
        "import sys, torch\nfrom classwise.models.load import load_model\n"
        "for spec in sys.argv[1:]:\n"
        "    try:\n        print(load_model(spec)(torch.full((1, 3, 16, 16), 0.25)).tolist())\n"
        "    except ValueError as error:\n        print(error)\n"
    )
    specs = ["hf:org/tiny", f"hf:org/tiny@{COMMIT}", f"hf:{saved}", "hf:org/gone", "hf:org/tiny@other"]
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *specs], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    *answers, gone, other = done.stdout.splitlines()
    assert len(answers) == 3
    assert len(set(answers)) == 1
    assert answers[0].startswith("[[")
    for said, repository in ((gone, "org/gone"), (other, "org/tiny")):
        assert said == (
            f"cannot reach the Hugging Face hub to download {repository}. "
            "Without network access, pass hf:DIR with a local directory"
        )


@pytest.mark.parametrize(("size", "mode"), [((0, 8), "bilinear"), (5000, "bilinear"), (8, "hamming")])
def test_invalid_sizes_and_filters(size, mode):
    with pytest.raises(InputError):
        Resize(size, mode)


def test_resized_images_stay_in_range():
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (1, 3, 8, 8))).float()
    resized = Resize((13, 13), "bicubic")(x)
    assert float(resized.min()) == 0
    assert float(resized.max()) == 1


def test_crop_larger_than_the_image():
    with pytest.raises(InputError, match="too small for a crop"):
        Resize((8, 8), crop=(9, 8))(torch.rand(1, 3, 4, 4))
