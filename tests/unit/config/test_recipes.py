from __future__ import annotations

from pathlib import Path

import pytest

from classwise.attacks import ATTACKS
from classwise.config.recipes import Recipe, load_recipe, parse_overrides, recipe_header, recipe_names
from classwise.config.spec import Spec, build, convert
from classwise.core.errors import InputError
from classwise.core.threat import Threat
from classwise.data.datasets import DATASETS
from classwise.models import MODELS
from classwise.policies import POLICIES
from classwise.training.optimizers import OPTIMIZERS
from classwise.training.plan import make_objective
from classwise.training.schedules import SCHEDULES
from each import for_each

MINIMAL = """
data = "digits"
model = "digits-cnn"
objective = "madry"
epochs = 3
validation_per_class = 5
"""


@pytest.fixture
def write(tmp_path):
    """Write a minimal recipe with additional lines."""

    def write(extra: str = "", base: str = MINIMAL) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(base + extra, encoding="utf-8")
        return path

    return write


def refused(recipe, overrides=None) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(recipe, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_recipes_of_the_package():
    assert {"digits/standard", "digits/madry", "digits/trades", "digits/wat"} <= set(recipe_names())


@for_each("name", recipe_names())
def test_recipes_of_the_package_are_valid(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.data.name in DATASETS
    assert Threat.parse(recipe.eps, recipe.norm).text == recipe.eps
    make_objective(recipe)
    build("policy", POLICIES, recipe.policy)
    build("optimizer", OPTIMIZERS, recipe.optimizer)
    build("schedule", SCHEDULES, recipe.schedule)
    build("attack", ATTACKS, recipe.validation_attack)
    model = Spec.parse(recipe.model)
    convert("model", MODELS[model.name], model.options)
    header = recipe_header(name)
    assert header
    assert not header.startswith("#")


def test_minimal_recipe(write):
    recipe = load_recipe(write())
    assert recipe.name == "mine"
    assert recipe.model == {"name": "digits-cnn"}
    assert recipe.policy == {"name": "uniform"}
    assert (recipe.eps, recipe.norm, recipe.seed, recipe.ema, recipe.clip) == ("8/255", "Linf", 0, 0, None)


def test_text_and_table_give_the_same_recipe(write):
    base = MINIMAL.replace('"madry"', '{ name = "trades", beta = "6.0" }')
    table = load_recipe(write(base=base))
    text = load_recipe(write(base=MINIMAL.replace('"madry"', '"trades:beta=6.0"')))
    assert text == table
    assert text.objective == {"name": "trades", "beta": "6.0"}


def test_recipe_object(write):
    recipe = load_recipe(write('name = "called"'))
    assert load_recipe(recipe) == recipe
    changed = load_recipe(recipe, {"seed": 4, "objective.beta": 2.0})
    assert (changed.name, changed.seed, changed.objective) == ("called", 4, {"name": "madry", "beta": 2.0})
    assert recipe.objective == {"name": "madry"}


def test_radius_of_both_norms(write):
    assert load_recipe(write("eps = 0.2")).eps == "0.2"
    assert load_recipe(write('eps = "2.0"\nnorm = "L2"')).eps == "2.0"
    assert load_recipe(write('norm = "L2"'), {"eps": "3/2"}).eps == "3/2"
    assert "did you mean 2.0/255?" in refused(write('eps = "2.0"'))


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ("epoch = 3", "unknown key 'epoch': did you mean 'epochs'?"),
        ("[augment]\nflop = true", "unknown key 'flop': did you mean 'flip'? (known: crop, flip, part, size)"),
        ("test_data = 1", "unknown key 'test_data'"),
        ('batch_size = "many"', "batch_size = 'many': must be an integer"),
        ("batch_size = 0", "batch_size = 0: must be at least 1"),
        ("batch_size = 1.5", "batch_size = 1.5: must be an integer"),
        ("seed = -1", "seed = -1: must be at least 0"),
        ("ema = 1", "ema = 1: must be less than 1"),
        ("clip = 0", "clip = 0: must be greater than 0"),
        ("name = 3", "name = 3: must be a string"),
        ('precision = "fp8"', "precision = 'fp8': must be 'auto', 'fp32' or 'bf16'"),
        ('select = "best"', "select = 'best': must be 'robust+worst'"),
        ('norm = "L1"', "norm = 'L1': must be 'Linf' or 'L2'"),
        ('eps = "a/b"', ": eps = 'a/b' is not a number like 0.03 or 8/255"),
        ("eps = 0", "eps must be a positive number, got 0"),
        ("eps = 8", "eps = 8 is larger than the whole range [0, 1] of a pixel; did you mean 8/255?"),
        ("policy = 3", "policy = 3: expected a name, name:key=value or a table with a name, got 3"),
        ("policy = { eta = 1 }", "policy = {'eta': 1}: a table needs a name"),
        ('schedule = "step:every"', "schedule = 'step:every': cannot read 'every'"),
        ('attack = "pgd"', "attack = 'pgd': must be a table"),
        ("augment = 3", "augment = 3: must be a table"),
        ("[augment]\ncrop = -4", "augment.crop = -4: must be at least 0"),
    ],
)
def test_invalid_values_are_refused(write, extra, complaint):
    path = write(extra)
    message = refused(path)
    assert message.startswith(f"recipe {path}: ")
    assert complaint in message
    assert not message.startswith(f"recipe {path}: eps") or message.count("eps") == 1  # the key is named once


@pytest.mark.parametrize("key", ["data", "model", "objective", "epochs", "validation_per_class"])
def test_missing_keys(write, key):
    lines = [line for line in MINIMAL.splitlines() if not line.startswith(f"{key} ")]
    description = Recipe.model_fields[key].description
    path = write(base="\n".join(lines))
    assert description
    assert refused(path) == f"recipe {path}: the key {key!r} is required ({description})"


def test_unknown_names_and_missing_files(tmp_path):
    assert refused("digits/wta").startswith("unknown recipe 'digits/wta': did you mean 'digits/wat'?")
    assert refused("runs") == "unknown recipe 'runs'; see classwise list recipes, or pass a .toml file"
    missing = tmp_path / "none.toml"
    assert refused(missing) == f"no such recipe file: {missing}"
    (tmp_path / "folder.toml").mkdir()
    assert refused(tmp_path / "folder.toml").startswith("no such recipe file")


@pytest.mark.parametrize(("recipe", "kind"), [(None, "NoneType"), ({"data": "digits"}, "dict")])
def test_recipes_of_other_types(recipe, kind):
    with pytest.raises(InputError) as caught:
        load_recipe(recipe)
    expected = "expected a recipe name, the path of a .toml file or a Recipe"
    assert str(caught.value) == f"recipe has type {kind}; {expected}"


@pytest.mark.parametrize("content", [b"data = ", b"data = 1\ndata = 2", b"\xff\xfe", b'data = "digits'])
def test_broken_toml(tmp_path, content):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    assert refused(path).startswith(f"{path} is not readable TOML: ")


def test_overrides():
    plain = load_recipe("digits/wat")
    changed = load_recipe(
        "digits/wat",
        {"epochs": 2, "policy.eta": 0.4, "objective.beta": 3, "augment.flip": True, "attack.steps": 9, "eps": 0.1},
    )
    assert changed.epochs == 2
    assert changed.policy == {"name": "wat", "eta": 0.4}
    assert changed.objective == {"name": "trades", "beta": 3}
    assert changed.augment.flip is True
    assert changed.attack == {"steps": 9}
    assert changed.eps == "0.1"
    expected = plain.model_dump() | {
        key: getattr(changed, key) for key in ("epochs", "policy", "objective", "attack", "eps")
    }
    assert changed.model_dump() == expected | {"augment": {"crop": 0, "flip": True, "part": None, "size": None}}


def test_overrides_change_settings_of_text_specs(write):
    path = write('schedule = "step:every=10"\npolicy = "wat"')
    changed = load_recipe(path, {"schedule.gamma": 0.5, "policy.eta": 0.1, "model.width": 8})
    assert changed.schedule == {"name": "step", "every": "10", "gamma": 0.5}
    assert changed.policy == {"name": "wat", "eta": 0.1}
    assert changed.model == {"name": "digits-cnn", "width": 8}


def test_overrides_change_settings_of_defaults(write):
    changed = load_recipe(write(), {"optimizer.lr": 0.05, "validation_attack.steps": 20})
    assert changed.optimizer == {"name": "sgd", "lr": 0.05}
    assert changed.validation_attack == {"name": "pgd", "steps": 20}
    assert load_recipe(write()).validation_attack == {"name": "pgd", "steps": 10}


def test_overrides_replace_whole_specs():
    changed = load_recipe("digits/wat", {"policy": "uniform", "schedule": {"name": "step", "every": 2}})
    assert changed.policy == {"name": "uniform"}
    assert changed.schedule == {"name": "step", "every": 2}


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"epohcs": 2}, "unknown key 'epohcs': did you mean 'epochs'?"),
        ({"polcy.eta": 2}, "unknown key 'polcy': did you mean 'policy'?"),
        ({"epochs": "two"}, "epochs = 'two': must be an integer"),
        ({"epochs.more": 1}, "cannot override 'epochs.more': 'epochs' has no setting 'more'"),
        ({"policy.eta.more": 1}, "cannot override 'policy.eta.more': 'policy' has no setting 'eta.more'"),
    ],
)
def test_bad_overrides(overrides, complaint):
    assert complaint in refused("digits/wat", overrides)


def test_overrides_from_a_command_line():
    given = ["seed=3", " eps = 8/255", "eps2=0.2", "augment.flip=true", "model=resnet18:width=8", "milestones=[1, 2]"]
    assert parse_overrides(given) == {
        "seed": 3,
        "eps": "8/255",
        "eps2": 0.2,
        "augment.flip": True,
        "model": "resnet18:width=8",
        "milestones": [1, 2],
    }
    assert parse_overrides(['name="a = b"', "data=folder:a=b"]) == {"name": "a = b", "data": "folder:a=b"}


@pytest.mark.parametrize("item", ["seed", "=3", " =3", ""])
def test_invalid_overrides_are_refused(item):
    with pytest.raises(InputError, match="expected key=value") as caught:
        parse_overrides([item])
    assert repr(item) in str(caught.value)


def test_recipes_are_frozen():
    recipe = load_recipe("digits/wat")
    with pytest.raises(ValueError, match="frozen"):
        recipe.epochs = 3
    assert isinstance(recipe, Recipe)
