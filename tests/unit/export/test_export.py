"""Exported models load in every way with the same logits, and names are never interpreted as markup."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import classwise as cw
from classwise.cli import app
from classwise.core.errors import InputError
from classwise.export import export
from classwise.export.source import architecture_source
from classwise.models import MODELS
from classwise.models.load import build_model, load_model
from classwise.models.model_config import ModelConfig, Normalization
from classwise.reporting import load_report
from classwise.reporting.formatting import plain
from classwise.reporting.model_card import SNIPPET

FILES = ["README.md", "config.json", "model.py", "model.safetensors", "robustbench.json"]
HOSTILE = [
    "cat",
    "# heading | cell",
    "<script>alert(1)</script>",
    "a\nb\n---\nc: [",
    "\u202eright to left\u202c",
    "![x](http://evil.example/x.png) www.evil.example",
    '"quoted": {yaml} \\ \x1b[31m',
    "```\n~~~ `code`",
    "long " * 60,
    "\U0001f600 ünïcödé \ufffe",
]


def make_run(folder: Path, spec: str, classes: list[str] | None = None, name: str = "digits/own") -> Path:
    """A training run of ten classes with random weights, evaluated beside it."""
    (folder / "checkpoints").mkdir(parents=True)
    torch.manual_seed(1)
    for which in ("best", "last"):
        model = build_model(spec, num_classes=10, in_channels=1)
        save_file(model.state_dict(), folder / "checkpoints" / f"{which}.safetensors")
    asked = {"name": name, "model": spec, "norm": "Linf", "eps": "0.2", "seed": 0, "objective": {"name": "madry"}}
    training = {"asked": asked, "num_classes": 10, "in_channels": 1, "best_epoch": 3, "rule": "robust"}
    (folder / "run.json").write_text(json.dumps({"training": training}))
    x, y = torch.rand(40, 1, 8, 8), torch.arange(40) % 10
    cw.evaluate(str(folder), (x, y), classes=classes or HOSTILE, attacks=["fgsm"], eps=0.01, out=folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run") / "run", "digits-cnn:normalize=mnist", name=HOSTILE[3])


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(run, tmp_path_factory.mktemp("export") / "new" / "model")


def by_the_snippet(folder: Path, x: torch.Tensor) -> torch.Tensor:
    """The logits computed by the code in the README, in a process that cannot import this package."""
    (block,) = (folder / "README.md").read_text().split("```python\n")[1:]
    snippet = block.partition("```")[0]
    assert snippet == SNIPPET
    save_file({"x": x}, folder.parent / "x.safetensors")
    code = (
        "import sys\nsys.modules['classwise'] = None\n"
        f"{snippet}\n"
        "import torch\nfrom safetensors.torch import load_file, save_file\n"
        "with torch.no_grad():\n"
        "    save_file({'logits': model(load_file('../x.safetensors')['x'])}, '../logits.safetensors')\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder.parent / "logits.safetensors")["logits"]


def test_every_way_of_loading_gives_the_same_logits(run, exported):
    assert sorted(path.name for path in exported.iterdir()) == FILES
    x = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        wanted = load_model(str(run))(x)
        assert torch.equal(load_model(f"hf:{exported}", num_classes=10, in_channels=1)(x), wanted)
    with pytest.raises(InputError, match="has 10 outputs, but the data has 7 classes"):
        load_model(f"hf:{exported}", num_classes=7)
    with pytest.raises(InputError, match="expects 1 channel, but the data has 3"):
        load_model(f"hf:{exported}", in_channels=3)
    assert torch.equal(by_the_snippet(exported, x), wanted)


def test_content_of_the_configuration(exported):
    config = json.loads((exported / "config.json").read_text())
    assert config["architecture"] == "digits-cnn:normalize=mnist"
    assert (config["num_classes"], config["in_channels"], config["classes"]) == (10, 1, HOSTILE)
    assert config["normalization"]["mean"] == pytest.approx([0.1307])
    assert config["trained_for"] == {"norm": "Linf", "eps": "0.2"}


@pytest.mark.parametrize("changes", [{"objective": "madry"}, {"model": None}, {"eps": 0.2}, None], ids=str)
def test_invalid_training_record(run, tmp_path, changes):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    record = json.loads((copy / "run.json").read_text())
    record["training"]["asked"] = changes and {**record["training"]["asked"], **changes}
    (copy / "run.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"training\.asked is incomplete"):
        export(copy, tmp_path / "out")


def test_user_architecture_is_refused_before_its_code_runs(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (tmp_path / "zoo.py").write_text(f"open({str(tmp_path / 'trace')!r}, 'w')\n")
    record = json.loads((copy / "run.json").read_text())
    record["training"]["asked"]["model"] = f"{tmp_path / 'zoo.py'}:make"
    (copy / "run.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match="cannot be exported; expected one of classwise list models"):
        export(copy, tmp_path / "out")
    assert not (tmp_path / "trace").exists()


def test_model_of_natural_training(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    record = json.loads((copy / "run.json").read_text())
    record["training"]["asked"]["objective"] = {"name": "standard"}
    (copy / "run.json").write_text(json.dumps(record))
    assert json.loads((export(copy, tmp_path / "out") / "config.json").read_text())["trained_for"] is None


def test_export_can_be_evaluated(run, exported, tmp_path):
    x, y = torch.rand(20, 1, 8, 8), torch.arange(20) % 10
    asked = {"classes": HOSTILE, "attacks": ["fgsm"], "eps": 0.05}
    first, second = (cw.evaluate(spec, (x, y), **asked) for spec in (str(run), f"hf:{exported}"))
    assert first["fgsm"] == second["fgsm"]


def test_files_have_default_permissions(exported):
    modes = {path.stat().st_mode & 0o777 for path in exported.iterdir()}
    assert len(modes) == 1
    assert not [path for path in exported.parent.iterdir() if path.name.startswith(".")]


def test_front_matter_is_valid_for_the_hub(run, exported):
    text = (exported / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    report = load_report(run)
    assert front["pipeline_tag"] == "image-classification"
    assert front["model-index"][0]["name"] == plain(HOSTILE[3])
    metrics = {one["name"]: one["value"] for one in front["model-index"][0]["results"][0]["metrics"]}
    assert metrics["natural accuracy"] == pytest.approx(report["natural"].overall.value, abs=1e-4)
    assert metrics["robust accuracy of the worst class, Linf 0.01"] == pytest.approx(report.worst.value, abs=1e-4)
    card = ModelCard(text)
    assert len(card.data.eval_results) == len(metrics)


@pytest.mark.parametrize("name", HOSTILE)
def test_yaml_preserves_names(run, tmp_path, name):
    """Names of data set and model that appear in the front matter."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    report = json.loads((copy / "report.json").read_text())
    report["dataset"]["name"] = name
    (copy / "report.json").write_text(json.dumps(report))
    text = (export(copy, tmp_path / "out") / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["datasets"] == [plain(name)]
    assert ModelCard(text).data.datasets == [plain(name)]


def test_markdown_preserves_names(run, exported):
    """Parsed by another library: a row for each class with its name as text, no markup, no link, no HTML."""
    text = (exported / "README.md").read_text().split("---\n", 2)[2]
    tokens = MarkdownIt("commonmark", {"html": True, "linkify": False}).enable("table").parse(text)
    assert not [token for token in tokens if token.type == "html_block"]
    inline = [child for token in tokens for child in token.children or []]
    assert {child.type for child in inline} <= {"text", "text_special", "strong_open", "strong_close", "code_inline"}
    cells = [
        "".join(child.content for child in tokens[place + 1].children or [])
        for place, token in enumerate(tokens)
        if token.type == "td_open"
    ]
    rows = [cells[start : start + 5] for start in range(0, len(cells), 5)]  # class, n, natural, fgsm, worst-case
    assert [row[0] for row in rows] == [*map(plain, HOSTILE), "all"]
    part = load_report(run)["fgsm"].by_class[3]
    assert rows[3][3] == f"{part.value:.1f} [{part.low:.1f}, {part.high:.1f}]"
    headings = [tokens[place + 1].content for place, token in enumerate(tokens) if token.type == "heading_open"]
    assert len(headings) == 5


@pytest.mark.parametrize("sign", ["#", "-", "1.", ">", "```", "    x"])
def test_names_at_line_start_are_not_markup(run, tmp_path, sign):
    """The first sentence of the card names the weakest class."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    text = (copy / "report.json").read_text()
    for name in HOSTILE:
        text = text.replace(json.dumps(name, ensure_ascii=False), json.dumps(f"{sign} evil"))
    (copy / "report.json").write_text(text)
    card = (export(copy, tmp_path / "out") / "README.md").read_text().split("---\n", 2)[2]
    kinds = [token.type for token in MarkdownIt("commonmark").enable("table").parse(card)]
    assert kinds.count("heading_open") == 5
    assert kinds.count("fence") == 2
    assert kinds.count("bullet_list_open") == 1
    assert not {"ordered_list_open", "blockquote_open", "code_block"} & set(kinds)


def test_robustbench_json_contains_the_classes(run, exported):
    card = json.loads((exported / "robustbench.json").read_text())
    assert card["eps"] == "0.01"
    assert set(card["classwise"]["class_acc"]) == set(HOSTILE)


def test_classes_with_equal_names_keep_their_results(tmp_path):
    run = make_run(tmp_path / "run", "digits-cnn", classes=[*map(str, range(8)), "crane", "crane"])
    card = json.loads((export(run, tmp_path / "out") / "robustbench.json").read_text())
    values = [part.value for part in load_report(run)["fgsm"].by_class]
    assert list(card["classwise"]["class_acc"]) == [*map(str, range(8)), "crane", "crane (class 9)"]
    assert list(card["classwise"]["class_acc"].values()) == values


def test_configuration_cannot_exceed_the_weights(exported, tmp_path):
    copy = Path(shutil.copytree(exported, tmp_path / "copy"))
    content = json.loads((copy / "config.json").read_text())
    for architecture in ("wide-resnet:depth=99994", "wide-resnet:width=9999", "vit:depth=100000"):
        (copy / "config.json").write_text(json.dumps({**content, "architecture": architecture}))
        with pytest.raises(InputError, match="describes a far larger model than its weights"):
            load_model(f"hf:{copy}")


def test_nothing_is_overwritten_or_left_incomplete(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("full", "file"):
        with pytest.raises(InputError, match="already exists"):
            export(run, tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert sorted(path.name for path in export(run, tmp_path / "empty").iterdir()) == FILES
    broken = Path(shutil.copytree(run, tmp_path / "broken"))
    (broken / "checkpoints" / "best.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match="is damaged"):
        export(broken, tmp_path / "never")
    assert not (tmp_path / "never").exists()
    (broken / "report.json").unlink()
    with pytest.raises(InputError, match="evaluate the model first"):
        export(broken, tmp_path / "never")


def test_failure_leaves_no_files(run, tmp_path, monkeypatch):
    def full(*args: object, **kwargs: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("classwise.export.model_card", full)
    with pytest.raises(OSError, match="No space"):
        export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_exports_the_evaluated_checkpoint(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    x, y = torch.rand(20, 1, 8, 8), torch.arange(20) % 10
    elsewhere = tmp_path / "elsewhere"
    cw.evaluate(f"{copy}@last", (x, y), classes=HOSTILE, attacks=["fgsm"], eps=0.01, out=elsewhere)
    last = load_model(f"{copy}@last")
    with torch.no_grad():
        assert torch.equal(load_model(f"hf:{export(elsewhere, tmp_path / 'out')}")(x), last(x))


def test_evaluation_of_weights_with_normalization(tmp_path):
    weights = tmp_path / "zoo.pt"
    torch.manual_seed(2)
    network = build_model("digits-cnn", num_classes=10, in_channels=1)
    state = {f"module.{name}": value for name, value in network.state_dict().items()}
    own = {"mu": torch.tensor([0.3]).view(1, 1, 1, 1), "sigma": torch.tensor([0.7]).view(1, 1, 1, 1)}
    torch.save({"state_dict": {**state, **own}}, weights)
    x, y = torch.rand(20, 1, 8, 8), torch.arange(20) % 10
    names = [str(label) for label in range(10)]
    cw.evaluate("digits-cnn", (x, y), weights=weights, classes=names, attacks=["fgsm"], eps=0.01, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"give the file zoo\.pt, with which it was evaluated"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(InputError, match=r"was evaluated with zoo\.pt, not with"):
        export(tmp_path / "run", tmp_path / "out", weights=tmp_path / "other.pt")
    folder = export(tmp_path / "run", tmp_path / "out", weights=weights)
    with torch.no_grad():
        wanted = network((x - 0.3) / 0.7)
        assert torch.allclose(load_model(f"hf:{folder}")(x), wanted, atol=1e-5)
    assert torch.allclose(by_the_snippet(folder, x), wanted, atol=1e-5)
    assert json.loads((folder / "config.json").read_text())["trained_for"] is None


def test_unregistered_architectures_are_refused(tmp_path):
    code = tmp_path / "zoo.py"
    code.write_text("from classwise.models import DigitsCNN\ndef make():\n    return DigitsCNN()\n")
    x, y = torch.rand(20, 1, 8, 8), torch.arange(20) % 10
    cw.evaluate(f"{code}:make", (x, y), attacks=["fgsm"], eps=0.01, out=tmp_path / "run")
    with pytest.raises(InputError, match="cannot be exported; expected one of classwise list models"):
        export(tmp_path / "run", tmp_path / "out")
    cw.evaluate(load_model(f"{code}:make"), (x, y), attacks=["fgsm"], eps=0.01, out=tmp_path / "memory")
    with pytest.raises(InputError, match="the evaluated model was a Python object"):
        export(tmp_path / "memory", tmp_path / "out")


FAMILIES = {
    **{inspect.getmodule(inspect.unwrap(MODELS[name])): name for name in sorted(MODELS, reverse=True)},
    inspect.getmodule(inspect.unwrap(MODELS["small-cnn"])): "small-cnn",  # the other one is for images of 8 pixels
    inspect.getmodule(inspect.unwrap(MODELS["wide-resnet"])): "wide-resnet:depth=10,width=1",
    "settings": "lenet:head=hypersphere,normalize=cifar10",
}
"""An architecture of each file, and one with settings."""
BUILD = """
import importlib.util, sys, torch
sys.modules['classwise'] = None
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location('model', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.build().eval()
    with torch.no_grad():
        print(model(torch.linspace(0, 1, 784 * 3).view(1, 3, 28, 28)).tolist())
"""


def test_exported_code_of_every_architecture_is_self_contained(tmp_path):
    """Built from the same seed it gives the same logits, with the names of the same weights."""
    answers, paths = [], []
    x = torch.linspace(0, 1, 784 * 3).view(1, 3, 28, 28)
    normalization = Normalization(mean=[0.1, 0.2, 0.3], std=[1.0, 2.0, 3.0])
    for number, spec in enumerate(FAMILIES.values()):
        named = "normalize=" in spec
        config = ModelConfig(
            architecture=spec,
            num_classes=4,
            in_channels=3,
            classes=list("abcd"),
            normalization=normalization,
        )
        torch.manual_seed(0)
        model = build_model(spec, num_classes=4, in_channels=3).eval()
        if not named:
            model = cw.models.normalized(model, normalization.mean, normalization.std)
        with torch.no_grad():
            answers.append(str(model(x).tolist()))
        paths.append(tmp_path / f"{number}.py")
        paths[-1].write_text(architecture_source(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BUILD, *paths],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == answers


def test_the_command(run, tmp_path):
    words = ["export", str(run), "--to", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"directory": str(tmp_path / "out"), "files": FILES}
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path / 'out'} already exists: pass a new directory as --to\n"
    done = CliRunner().invoke(app, ["export", str(run), "--to", str(tmp_path / "other one")])
    assert f"classwise evaluate --model 'hf:{tmp_path / 'other one'}'" in done.stdout
