"""Loading of models from specs and of weights from files, and one-line errors otherwise."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import nn

from classwise.core.errors import InputError
from classwise.models import MODELS, DigitsCNN, PreActResNet, WideResNet, normalized
from classwise.models.load import build_model, load_model
from classwise.models.normalize import NORMALIZATIONS, Normalized
from classwise.models.weights import digest_model, load_weights
from classwise.models.weights_file import read_weights
from classwise.training.checkpoint import load_state
from each import for_each

REPOSITORY = Path(__file__).parents[3]
CHECKPOINTS = Path(os.environ.get("CLASSWISE_CHECKPOINTS", REPOSITORY.parent / "shared" / "checkpoints"))


@pytest.fixture
def state():
    """The weights of a small network with other than default settings."""
    torch.manual_seed(7)
    return DigitsCNN().state_dict()


@pytest.fixture
def weights(tmp_path, state):
    path = tmp_path / "digits.safetensors"
    save_file(state, path)
    return path


def same(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    own = model.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in state)


def complaint(call, *args, **kwargs) -> str:
    """Return the one-line error of a call."""
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


# -- what specs name --------------------------------------------------------------------------------------


def test_architecture_with_weights(weights, state):
    model = load_model("digits-cnn", weights=weights)
    assert same(model, state)
    assert not any(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_weights_can_be_a_string(weights, state):
    assert same(load_model("digits-cnn", weights=str(weights)), state)


def test_architecture_without_weights_requires_permission():
    assert "without weights" in complaint(load_model, "digits-cnn:num_classes=3")
    assert isinstance(load_model("digits-cnn", allow_untrained=True), DigitsCNN)


def test_architecture_takes_sizes_from_the_data():
    model = load_model("digits-cnn", num_classes=4, in_channels=2, allow_untrained=True)
    assert model(torch.rand(1, 2, 8, 8)).shape == (1, 4)
    assert "has 5 outputs, but the data has 4 classes" in complaint(
        load_model, "digits-cnn:num_classes=5", num_classes=4, allow_untrained=True
    )
    assert load_model("digits-cnn:num_classes=4", num_classes=4, allow_untrained=True).linear.out_features == 4
    assert "num_classes = 0" in complaint(load_model, "digits-cnn", num_classes=0, allow_untrained=True)


@for_each(
    ("spec", "said"),
    [
        ("digits-cn", "unknown model 'digits-cn': did you mean 'digits-cnn'?"),
        ("digits-cn:num_classes=3", "did you mean 'digits-cnn'?"),
        ("", "unknown model ''"),
        ("digits-cnn:nope", "settings are key=value"),
        ("digits-cnn:width=3", "unknown setting of model 'digits-cnn'"),
        ("digits-cnn:num_classes=ten", "num_classes = 'ten'"),
        ("digits-cnn:normalize=cifar10", "is for 3 channels"),
        ("wide-resnet:depth=33", "expected 6n + 4"),
        ("hf:./gone", "model 'hf:./gone': no such directory"),
        ("hf:", "no such directory"),
        ("hf:name", "expected a directory, hf:org/name or hf:org/name@revision"),
        ("hf:org/name@", "expected a directory"),
        ("onnx:gone.onnx", "no such file"),
        ("model.onnx", "use onnx:model.onnx"),
        ("torchscript:gone.pt", "no such file"),
        ("runs/gone", "no such run directory"),
        ("zoo.py", "expected a factory in the file, as in zoo.py:make_model"),
        ("best.safetensors", "is a weights file"),
        ("no_such_zoo:make", "importing no_such_zoo failed"),
    ],
)
def test_invalid_specs(spec, said):
    assert said in complaint(load_model, spec, allow_untrained=True)


def test_model_too_large_for_memory(monkeypatch):
    def too_large(*, num_classes: int = 10) -> nn.Module:
        return nn.Linear(1 << 58, num_classes)

    monkeypatch.setitem(MODELS, "too-large", too_large)
    assert "model 'too-large' cannot be built: " in complaint(load_model, "too-large", allow_untrained=True)


def test_user_factory(tmp_path, weights, state):
    path = tmp_path / "zoo.py"
    path.write_text(
        "import torch\nfrom classwise.models import DigitsCNN\n"
        "def make():\n    return DigitsCNN().train()\n"
        "def number():\n    return 3\n"
        "def broken():\n    raise KeyError('weights')\n"
    )
    model = load_model(f"{path}:make")
    assert isinstance(model, DigitsCNN)
    assert not model.training
    assert same(load_model(f"{path}:make", weights=weights), state)
    assert "returned an object of type int; expected a torch.nn.Module" in complaint(load_model, f"{path}:number")
    assert "KeyError: 'weights'" in complaint(load_model, f"{path}:broken")
    assert "does not define 'gone'" in complaint(load_model, f"{path}:gone")
    assert isinstance(load_model("torch.nn:Identity"), nn.Identity)


# -- run directories --------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """A training run of a normalizing network with 3 classes; its last weights are zeros."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    spec = "digits-cnn:normalize=mnist"
    training = {"asked": {"model": spec, "seed": 1}, "num_classes": 3, "in_channels": 1}
    (folder / "run.json").write_text(json.dumps({"training": training}))
    torch.manual_seed(8)
    state = build_model(spec, num_classes=3).state_dict()
    save_file(state, folder / "checkpoints" / "best.safetensors")
    zeros = {k: v if k.startswith("normalize.") else torch.zeros_like(v) for k, v in state.items()}
    save_file(zeros, folder / "checkpoints" / "last.safetensors")
    return folder


def test_run_directory(run):
    best = load_file(run / "checkpoints" / "best.safetensors")
    last = load_file(run / "checkpoints" / "last.safetensors")
    model = load_model(str(run))
    assert isinstance(model, Normalized)
    assert same(model, best)
    assert same(load_model(f"{run}@best", num_classes=3, in_channels=1), best)
    assert same(load_model(f"{run}@last"), last)
    assert same(load_model(str(run), weights=run / "checkpoints" / "last.safetensors"), last)


def test_run_directory_does_not_fit_the_data(run):
    classes, channels = complaint(load_model, str(run), num_classes=10), complaint(load_model, str(run), in_channels=3)
    assert classes == f"model {str(run)!r} has 3 outputs, but the data has 10 classes"
    assert channels == f"model {str(run)!r} expects 1 channel, but the data has 3"
    assert "did you mean 'last'" in complaint(load_model, f"{run}@lst")
    said = complaint(load_model, f"{run}:normalize=mnist")
    assert said == f"model '{run}:normalize=mnist': a run directory takes no settings; pass '{run}'"
    assert "names a checkpoint" in complaint(load_model, f"{run}@last", weights="x.pt")
    (run / "checkpoints" / "best.safetensors").unlink()
    assert "best.safetensors': no such file" in complaint(load_model, str(run))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "is not a run directory: it contains no run.json"),
        ("{", "not readable JSON"),
        ("[]", "names no architecture"),
        ("{}", "holds no model"),
        ('{"training": null}', "names no architecture"),
        ('{"training": {"asked": {"model": 3}}}', "names no architecture"),
        ('{"training": {"asked": {"model": "digits-cnn"}}}', "num_classes = None"),
        (
            '{"training": {"asked": {"model": "digits-cnn"}, "num_classes": true, "in_channels": 1}}',
            "num_classes = True",
        ),
        (
            '{"training": {"asked": {"model": "digits-cnn"}, "num_classes": 3, "in_channels": "1"}}',
            "in_channels = '1'",
        ),
        (
            '{"training": {"asked": {"model": "digits-cm"}, "num_classes": 3, "in_channels": 1}}',
            "did you mean 'digits-cnn'",
        ),
    ],
)
def test_run_directory_with_invalid_run_json(run, text, said):
    if text is None:
        (run / "run.json").unlink()
    else:
        (run / "run.json").write_text(text)
    assert said in complaint(load_model, str(run))


# -- what files hold --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".ckpt", ".pth.tar", ".PT"])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_reads_every_suffix(tmp_path, state, suffix, legacy):
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    assert same(load_model("digits-cnn", weights=path), state)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"state_dict": s, "epoch": 3, "best_acc": 0.5},
        lambda s: {"model_state_dict": s, "optimizer_state_dict": {"state": {}}},
        lambda s: {"model": s},
        lambda s: {"net": s, "acc": 90.0},
        lambda s: {"model": {"state_dict": s, "args": []}},
        lambda s: {"model_ema": s, "epoch": 1},
        lambda s: {"model_ema": {k: torch.zeros_like(v) for k, v in s.items()}, "net": s, "epoch": 1},
        lambda s: {k: nn.Parameter(v) for k, v in s.items()},
    ],
)
def test_unwraps_what_training_scripts_save(tmp_path, state, wrap):
    torch.save(wrap(state), tmp_path / "weights.pt")
    assert same(load_model("digits-cnn", weights=tmp_path / "weights.pt"), state)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "0.", "1.", "module._orig_mod.model."])
def test_removes_prefixes(tmp_path, state, prefix):
    save_file({prefix + name: value for name, value in state.items()}, tmp_path / "weights.safetensors")
    assert same(load_model("digits-cnn", weights=tmp_path / "weights.safetensors"), state)


def test_keeps_prefixes_of_the_model(tmp_path):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    other = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    load_weights(other, tmp_path / "weights.safetensors")
    assert same(other, model.state_dict())
    assert list(read_weights(tmp_path / "weights.safetensors")) == ["0.0.bias", "0.0.weight"]


def test_averaged_model_of_torch(tmp_path, state):
    model = DigitsCNN()
    model.load_state_dict(state)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    torch.save(averaged.state_dict(), tmp_path / "weights.pt")
    assert same(load_model("digits-cnn", weights=tmp_path / "weights.pt"), state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_floats_to_the_type_of_the_model(tmp_path, state, dtype):
    stored = {name: value.to(dtype) for name, value in state.items()}
    save_file(stored, tmp_path / "weights.safetensors")
    model = load_model("digits-cnn", weights=tmp_path / "weights.safetensors")
    assert same(model, {name: value.float() for name, value in stored.items()})
    assert model.conv1.weight.dtype == torch.float32


def test_ignores_unused_block_of_trades_and_counters(tmp_path):
    model = WideResNet(depth=10, width=1)
    state = model.state_dict()
    extra = {name.replace("block1.", "sub_block1."): v for name, v in state.items() if name.startswith("block1.")}
    assert len(extra) > 5
    torch.save({f"module.{k}": v for k, v in {**state, **extra}.items()}, tmp_path / "trades.pt")
    loaded = load_model("wide-resnet:depth=10,width=1", weights=tmp_path / "trades.pt")
    assert same(loaded, state)

    old = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    torch.save(old, tmp_path / "old.pt")
    assert same(load_model("wide-resnet:depth=10,width=1", weights=tmp_path / "old.pt"), state)

    torch.save({**state, "conv1.num_batches_tracked": torch.tensor(3)}, tmp_path / "more.pt")
    assert same(load_model("wide-resnet:depth=10,width=1", weights=tmp_path / "more.pt"), state)


def test_sub_block_of_the_model_is_loaded(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.sub_block1 = nn.Linear(2, 2)

    save_file({"other.weight": torch.zeros(2, 2)}, tmp_path / "weights.safetensors")
    assert "2 missing: 'sub_block1.weight'" in complaint(load_weights, Model(), tmp_path / "weights.safetensors")


# -- normalization ----------------------------------------------------------------------------------------


def mnist(names: tuple[str, str], shape: tuple[int, ...] = (1,)) -> dict[str, torch.Tensor]:
    mean, std = NORMALIZATIONS["mnist"]
    return {names[0]: torch.tensor(mean).reshape(shape), names[1]: torch.tensor(std).reshape(shape)}


@pytest.mark.parametrize(
    ("prefix", "own"),
    [
        ("", {}),
        ("model.", {}),
        ("model.", mnist(("normalize.mean", "normalize.std"), (1, 1, 1))),
        ("1.", mnist(("0.mean", "0.std"), (1, 1, 1, 1))),
        ("", mnist(("mu", "sigma"))),
        ("module.model.", mnist(("module.normalizer.new_mean", "module.normalizer.new_std"))),
    ],
)
def test_normalized_model_accepts_files_with_equal_normalization(tmp_path, state, prefix, own):
    save_file({**{prefix + k: v for k, v in state.items()}, **own}, tmp_path / "weights.safetensors")
    model = load_model("digits-cnn:normalize=mnist", weights=tmp_path / "weights.safetensors")
    assert same(model.model, state)
    assert same(model.normalize, normalized(nn.Identity(), *NORMALIZATIONS["mnist"]).normalize.state_dict())


def test_normalization_in_float16(tmp_path):
    model = normalized(DigitsCNN(in_channels=3), *NORMALIZATIONS["cifar10"])
    save_file({k: v.half() for k, v in model.state_dict().items()}, tmp_path / "weights.safetensors")
    loaded = load_model("digits-cnn:in_channels=3,normalize=cifar10", weights=tmp_path / "weights.safetensors")
    assert torch.equal(loaded.normalize.mean, model.normalize.mean)


def test_normalization_of_the_file_must_equal_the_models(tmp_path, state):
    path = tmp_path / "weights.safetensors"
    inner = {f"1.{name}": value for name, value in state.items()}
    save_file({**inner, **mnist(("0.mean", "0.std"))}, path)
    said = complaint(load_weights, DigitsCNN(), path)
    assert "'0.mean' (0.1307) (normalize=mnist); the model does not normalize" in said

    save_file({**inner, "0.mean": torch.tensor([0.5]), "0.std": torch.tensor([0.5])}, path)
    said = complaint(load_model, "digits-cnn:normalize=mnist", weights=path)
    assert "'0.mean' (0.5); the model has (0.1307)" in said

    save_file({**inner, "0.mean": torch.tensor([0.1307]), "0.std": torch.tensor([0.9])}, path)
    assert "'0.std' (0.9); the model has (0.3081)" in complaint(load_model, "digits-cnn:normalize=mnist", weights=path)
    for odd in (torch.zeros(3), torch.tensor([float("nan")]), torch.tensor([0]), torch.zeros(0)):
        save_file({**inner, "0.mean": odd}, path)
        assert "'0.mean'" in complaint(load_model, "digits-cnn:normalize=mnist", weights=path)

    save_file({**inner, "0.mean": torch.zeros(1), "0.std": torch.ones(1)}, path)  # the file states no normalization
    assert same(load_model("digits-cnn", weights=path), state)


def test_model_with_own_means_loads_them(tmp_path):
    class Model(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.register_buffer("mean", torch.full((3,), value))

    save_file(Model(0.3).state_dict(), tmp_path / "weights.safetensors")
    model = Model(0.0)
    load_weights(model, tmp_path / "weights.safetensors")
    assert same(model, Model(0.3).state_dict())


# -- what does not fit ------------------------------------------------------------------------------------


def test_mismatched_names(tmp_path, state):
    path = tmp_path / "weights.safetensors"
    save_file({**state, **{f"extra{i}": torch.zeros(1) for i in range(5)}}, path)
    said = complaint(load_model, "digits-cnn", weights=path)
    assert said.endswith("does not fit the model: 5 not in the model: 'extra0', 'extra1', 'extra2', ...")

    save_file({name: value for name, value in state.items() if "conv" not in name}, path)
    said = complaint(load_model, "digits-cnn", weights=path)
    assert said.endswith("6 missing: 'conv1.weight', 'conv1.bias', 'conv2.weight', ...")

    save_file({"a" * 10_000 + "\n": torch.zeros(1)}, path)
    said = complaint(load_model, "digits-cnn", weights=path)
    assert "8 missing" in said
    assert "1 not in the model" in said


def test_other_preact_variant_does_not_load(tmp_path):
    save_file(PreActResNet((2, 2, 2, 2), final_bn=False).state_dict(), tmp_path / "weights.safetensors")
    said = complaint(load_model, "preact-resnet18", weights=tmp_path / "weights.safetensors")
    assert "4 missing: 'bn.weight', 'bn.bias', 'bn.running_mean', ..." in said
    model = load_model("preact-resnet18:final_bn=false", weights=tmp_path / "weights.safetensors")
    assert model.bn is None


def test_mismatched_shapes(weights):
    said = complaint(load_model, "digits-cnn:num_classes=100", weights=weights)
    assert "'linear.weight' has shape (10, 256); the model has (100, 256)" in said
    assert "the file has 10 classes, the model has 100 (num_classes=10)" in said
    said = complaint(load_model, "digits-cnn:in_channels=3", weights=weights)
    assert "'conv1.weight' has shape (16, 1, 3, 3); the model has (16, 3, 3, 3)" in said
    assert "classes" not in said


def test_mismatched_types(tmp_path, state):
    path = tmp_path / "weights.safetensors"
    save_file({**state, "conv1.bias": torch.zeros(16, dtype=torch.int64)}, path)
    assert "'conv1.bias' is torch.int64; the model has torch.float32" in complaint(
        load_model, "digits-cnn", weights=path
    )
    save_file({**state, "conv1.bias": torch.zeros(16, dtype=torch.complex64)}, path)
    assert "torch.complex64" in complaint(load_model, "digits-cnn", weights=path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_nonfinite_weights_are_refused(tmp_path, state, value):
    bias = torch.full((16,), value, dtype=torch.float64)
    save_file({**state, "conv1.bias": bias}, tmp_path / "weights.safetensors")
    assert "'conv1.bias' contains values that are not finite" in complaint(
        load_model, "digits-cnn", weights=tmp_path / "weights.safetensors"
    )


def test_error_leaves_the_model_unchanged(tmp_path, state):
    model = DigitsCNN()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({**state, "linear.bias": torch.full((10,), float("nan"))}, tmp_path / "weights.safetensors")
    complaint(load_weights, model, tmp_path / "weights.safetensors")
    assert same(model, before)


# -- files that are damaged, or worse ---------------------------------------------------------------------


def test_missing_files_and_unknown_suffixes(tmp_path):
    assert "no such file" in complaint(read_weights, tmp_path / "gone.pt")
    (tmp_path / "folder.pt").mkdir()
    folder = str(tmp_path / "folder.pt")
    assert complaint(read_weights, folder) == f"weights {folder!r} is a directory; pass a file"
    for name in ("weights.pkl", "weights", "weights.npz", "weights.bin"):
        (tmp_path / name).write_bytes(pickle.dumps({}))
        assert "expected a file with the suffix .safetensors, .pt" in complaint(read_weights, tmp_path / name)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.zeros(1)], "contains an object of type list; expected a state dict"),
        (torch.zeros(1), "contains an object of type Tensor; expected a state dict"),
        ({}, "contains no weights"),
        ({"state_dict": {}}, "contains no weights"),
        ({"epoch": 3, "weights": torch.zeros(1)}, "'epoch' has type int; expected a state dict"),
        ({"optimizer": {"state": {}}}, "'optimizer' has type dict; expected a state dict"),
        ({3: torch.zeros(1)}, "a key of type int has type Tensor; expected a state dict"),
        (
            {"a": torch.eye(3).to_sparse()},
            "'a' is not a dense tensor",
        ),
        (
            {"a": torch.empty(3, device="meta")},
            "'a' is not a dense tensor",
        ),
        (
            {"a": torch.zeros(1).expand(1 << 40)},
            "'a' is not a dense tensor",
        ),
    ],
)
def test_pickles_without_a_state_dict(tmp_path, content, said):
    torch.save(content, tmp_path / "weights.pt")
    assert said in complaint(load_model, "digits-cnn", weights=tmp_path / "weights.pt")


class Hostile:
    """A pickle that creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
def test_unreadable_files(tmp_path):
    for name, read in (("weights.pt", read_weights), ("last.pt", load_state)):
        (tmp_path / name).symlink_to("/proc/self/mem")
        assert complaint(read, tmp_path / name) == f"{tmp_path / name} cannot be read: Input/output error"


def test_pickle_with_code_is_refused(tmp_path, state):
    trace, path = tmp_path / "trace", tmp_path / "weights.pt"
    for legacy in (False, True):
        torch.save({"state_dict": state, "x": Hostile(trace)}, path, _use_new_zipfile_serialization=not legacy)
        said = complaint(load_model, "digits-cnn", weights=path)
        assert "is refused: it contains pickled objects, and loading it would run code (" in said
        assert "mkdir); save model.state_dict() instead" in said
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(Hostile(trace), protocol=protocol))
        complaint(load_model, "digits-cnn", weights=path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())  # noqa: S301 - the file is what it claims to be
    assert trace.exists()


def test_pickled_module_is_refused(tmp_path):
    torch.save(DigitsCNN(), tmp_path / "weights.pt")
    said = complaint(load_model, "digits-cnn", weights=tmp_path / "weights.pt")
    assert "would run code (classwise.models.small.DigitsCNN); save model.state_dict() instead" in said


def header(content: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: tuple[int, ...] = (1,), offsets: tuple[int, int] = (0, 4)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content",
    {
        "empty": b"",
        "short": b"abc",
        "text": b"not a safetensors file",
        "endless header": header(b"{}", length=(1 << 64) - 1),
        "long header": header(b"{}", length=99_999_999),
        "no json": header(b"nonsense"),
        "no table": header([]),
        "no tensors": header({}),
        "not unicode": header(b"\xff\xfe{}"),
        "deep": header(b"[" * 100_000),
        "overlap": header({"a": entry(), "b": entry()}, b"0000"),
        "beyond the end": header({"a": entry(offsets=(1 << 40, (1 << 40) + 4))}, b"0000"),
        "backwards": header({"a": entry(offsets=(4, 0))}, b"0000"),
        "negative": header({"a": entry(shape=(-1,))}, b"0000"),
        "too large": header({"a": entry(shape=(1 << 40,))}, b"0000"),
        "overflow": header({"a": entry(shape=(1 << 62, 1 << 62))}, b"0000"),
        "nothing, hugely": header({"a": entry(shape=(0, (1 << 64) - 1), offsets=(0, 0))}),
        "nothing, in a valid size": header({"conv1.weight": entry(shape=(0, 1 << 60), offsets=(0, 0))}),
        "many dimensions": header({"conv1.weight": entry(shape=(1,) * 2000)}, b"0000"),
        "unknown type": header({"a": entry(dtype="Q7")}, b"0000"),
        "odd type": header({"a": entry(dtype="F8_E8M0", shape=(4,))}, b"0000"),
        "packed type": header({"a": entry(dtype="F4", shape=(8,))}, b"0000"),
        "a mean": header({"mean": entry(dtype="F8_E8M0", shape=(4,))}, b"0000"),
    }.items(),
    ids=lambda item: item[0],
)
def test_inconsistent_headers_raise_one_line_errors(tmp_path, content):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content[1])
    assert str(path) in complaint(load_model, "digits-cnn", weights=path)


def test_inconsistent_header_of_one_tensor(tmp_path, state):
    """All names are there; one tensor has a type or a shape that cannot be copied."""
    path = tmp_path / "weights.safetensors"
    for dtype, shape in (("F8_E4M3", (16,)), ("F8_E8M0", (16,)), ("F4", (16,)), ("F32", (1,) * 500)):
        table, data = {}, b""
        for name, value in state.items():
            raw = value.numpy().tobytes()
            table[name] = entry("F32", tuple(value.shape), (len(data), len(data) + len(raw)))
            if name == "conv1.bias":
                raw = raw[: {"F4": 8, "F32": 4}.get(dtype, 16)]
                table[name] = entry(dtype, shape, (len(data), len(data) + len(raw)))
            data += raw
        path.write_bytes(header(table, data))
        assert "'conv1.bias'" in complaint(load_model, "digits-cnn", weights=path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".tar"])
def test_truncated_files(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    state = nn.Linear(4, 4).state_dict()
    if suffix == ".safetensors":
        whole = save(state)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=suffix == ".pt")
        whole = path.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:length])
        assert str(path) in complaint(load_weights, nn.Linear(4, 4), path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".tar"])
def test_flipped_bytes_raise_only_input_errors(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    state = nn.Linear(4, 4).state_dict()
    if suffix == ".safetensors":
        whole = save(state)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=suffix == ".pt")
        whole = path.read_bytes()
    generator = random.Random(0)
    refused = []
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(generator.choice((1, 1, 4))):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            load_weights(nn.Linear(4, 4), path)
        except InputError as error:
            refused.append(str(error))
    assert refused
    assert not any("\n" in message for message in refused)


# -- digests ----------------------------------------------------------------------------------------------


def test_digest_distinguishes_models(state):
    def digits(**changes: torch.Tensor) -> nn.Module:
        model = DigitsCNN()
        model.load_state_dict({**state, **changes})
        return model

    class Other(DigitsCNN):
        pass

    other = Other()
    other.load_state_dict(state)
    bias = state["linear.bias"].clone()
    bias[3] = torch.nextafter(bias[3], torch.tensor(10.0))
    digests = [
        digest_model(model)
        for model in (
            digits(),
            digits(**{"linear.bias": bias}),
            digits().double(),
            digits().bfloat16(),
            other,
        )
    ]
    assert len(set(digests)) == len(digests)
    assert digest_model(digits().train()) == digest_model(digits().eval()) == digests[0]
    assert digest_model(digits().to(memory_format=torch.channels_last)) == digests[0]
    assert digest_model(WideResNet(depth=10, width=1)) != digests[0]  # with 0-dimensional integer counters


def test_digest_depends_on_names_and_types():
    def holding(name: str, value: torch.Tensor) -> nn.Module:
        model = nn.Identity()
        model.register_buffer(name, value)
        return model

    half = torch.zeros(4, dtype=torch.float16)
    models = [nn.Identity(), holding("a", torch.zeros(0)), holding("a", half), holding("b", half)]
    models += [holding("a", half.bfloat16()), holding("a", half.reshape(2, 2)), holding("a", torch.tensor(0.0))]
    assert len({digest_model(model) for model in models}) == len(models)


# -- published checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["trades", "wat"])
def test_resnet18_checkpoints_load_strictly(method):
    path = CHECKPOINTS / f"cifar10_resnet18_{method}.safetensors"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {CHECKPOINTS}; set CLASSWISE_CHECKPOINTS")
    stored = load_file(path)
    model = load_model("resnet18", weights=path)
    assert same(model, {k: v.float() if v.is_floating_point() else v for k, v in stored.items()})
    assert model.conv1.weight.dtype == torch.float32
    with torch.no_grad():
        assert model(torch.full((1, 3, 32, 32), 0.5)).isfinite().all()
    assert "the file has 10 classes, the model has 100" in complaint(
        load_model, "resnet18:num_classes=100", weights=path
    )
    assert "does not fit the model" in complaint(load_model, "preact-resnet18", weights=path)
