"""Actor and critic: their arguments, the file of --megatron-config-path, and what is refused."""

import json
from pathlib import Path

import pytest

from instep.arguments import cluster
from instep.arguments.parse import parse
from instep.arguments.roles import args_of_role, overridable
from instep.errors import ConfigError
from instep.training import lr_schedule
from tests.assets import make_checkpoint, make_prompts

PPO = ["--advantage-estimator", "ppo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("roles")
    make_checkpoint(root / "hf")
    make_prompts(root / "train.jsonl", 4)
    return root


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """The ranks of these tests are never started, so that they need no cores."""
    monkeypatch.setattr(cluster, "num_usable_cpus", lambda: 8)


def arguments(folder, *more):
    words = [
        "--hf-checkpoint",
        str(folder / "hf"),
        "--prompt-data",
        str(folder / "train.jsonl"),
        "--rm-type",
        "math",
        "--label-key",
        "label",
    ]
    words += ["--input-key", "prompt", "--rollout-batch-size", "4", "--num-rollout", "9", "--device", "cpu"]
    return parse([*words, "--actor-num-gpus-per-node", "1", "--lr", "1e-3", *more], "train")


def with_file(folder, content, *more):
    path = folder / "roles.yaml"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return arguments(folder, *PPO, *more, "--megatron-config-path", str(path))


def roles(actor=None, critic=None):
    overrides = {"actor": actor, "critic": critic}
    entries = [{"name": "default", "role": r, "overrides": o} for r, o in overrides.items() if o is not None]
    return {"megatron": entries}


def test_the_guides_file(folder):
    """vime's usage guide; YAML reads `1e-6` as text."""
    text = (
        "megatron:\n  - name: default\n    role: actor\n    overrides:\n      lr: 1e-6\n"
        "  - name: default\n    role: critic\n    overrides:\n      lr: 1e-5\n"
    )
    args = with_file(folder, text)
    assert args.lr == 1e-6 and args_of_role(args, "actor") is args
    assert args_of_role(args, "critic").lr == args.critic_lr == 1e-5


def test_a_critic_has_the_actors_settings_but_its_own_warm_up(folder):
    args = arguments(folder, *PPO, "--lr-warmup-fraction", "0.5", "--weight-decay", "0.3", "--adam-beta2", "0.95")
    own = args_of_role(args, "critic")
    assert (own.lr, own.weight_decay, own.adam_beta2) == (1e-3, 0.3, 0.95)
    assert lr_schedule.from_args(own, 100).warmup == 0 and lr_schedule.from_args(args, 100).warmup == 50
    args = arguments(folder, *PPO, "--critic-lr", "5e-3", "--critic-lr-warmup-iters", "7")
    schedule = lr_schedule.from_args(args_of_role(args, "critic"), 100)
    assert (schedule.lr, schedule.warmup) == (5e-3, 7) and args.lr == 1e-3 and args.lr_warmup_iters == 0


def test_every_kind_of_override_reaches_its_role(folder):
    actor = {"load": "a", "save": "b", "clip-grad": 0.5}
    critic = {"load": str(folder), "save": "d", "weight_decay": 0.2, "lr-decay-style": "constant", "min_lr": 1e-4}
    args = with_file(folder, roles(actor, critic), "--lr-decay-style", "cosine")
    own = args_of_role(args, "critic")
    assert (args.load, args.save, args.clip_grad) == ("a", "b", 0.5)
    assert (args.critic_load, args.critic_save) == (str(folder), "d")
    assert (own.weight_decay, own.lr_decay_style, own.min_lr) == (0.2, "constant", 1e-4)
    assert (args.weight_decay, args.lr_decay_style, args.min_lr) == (0.01, "cosine", 0.0)
    assert own.clip_grad == 0.5  # what the actor is set to is what the critic inherits
    json.dumps(args.to_dict())


def test_the_critic_may_have_another_number_of_ranks(folder):
    args = arguments(folder, *PPO, "--critic-num-gpus-per-node", "2")
    own = args_of_role(args, "critic")
    assert (args.world_size, args.dp_size, own.world_size, own.dp_size) == (1, 1, 2, 2)


FILES = {
    "lrr": (roles(critic={"lrr": 1}), "megatron[0].overrides.lrr: is unknown|did you mean lr?"),
    "topology": (
        roles(actor={"tensor_model_parallel_size": 2}),
        "megatron[0].overrides.tensor_model_parallel_size|is the same for both roles|give --tensor-model-parallel-size",
    ),
    "value": (roles(actor={"lr": "fast"}), "megatron[0].overrides.lr|'fast'|not a number"),
    "negative": (roles(critic={"lr": -1}), "megatron[0].overrides.lr|-1|at least 0"),
    "list": (roles(critic={"lr": [1]}), "megatron[0].overrides.lr|is not FLOAT"),
    "style": (roles(critic={"lr_decay_style": "round"}), "lr_decay_style|'round'|not one of constant"),
    "role": ({"megatron": [{"role": "judge"}]}, "megatron[0]: 'judge' is not a role|role: critic"),
    "no role": ({"megatron": [{"overrides": {}}]}, "megatron[0]: has no role|role: critic"),
    "entry": ({"megatron": [{"role": "actor", "override": {}}]}, "megatron[0]: override|is unknown|overrides"),
    "top": ({"megatron": [], "megatrons": []}, "megatrons|is unknown"),
    "twice": ({"megatron": [{"role": "actor"}, {"role": "actor"}]}, "megatron[1]: is a second entry for the actor"),
    "shape": ({"megatron": {"actor": {}}}, "has no list `megatron`"),
    "overrides": ({"megatron": [{"role": "actor", "overrides": [1]}]}, "overrides are not names"),
    "yaml": ("megatron: [", "cannot be read|YAML"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_wrong_is_named_with_its_key(folder, name):
    content, words = FILES[name]
    with pytest.raises(ConfigError) as caught:
        with_file(folder, content)
    text = str(caught.value)
    text += f"{caught.value.where}: {caught.value.what}"
    assert str(folder / "roles.yaml") in text
    assert [w for w in words.split("|") if w not in text] == [], text


FLAGS = {
    "--value-clip 0": "--value-clip|above 0",
    "--value-clip -0.1": "--value-clip|above 0",
    "--num-critic-only-steps 10": "for the critic alone, but the run has 9|--num-critic-only-steps|use less than 9",
    "--num-critic-only-steps -1": "--num-critic-only-steps|at least 0",
    "--critic-lr -1": "--critic-lr|at least 0",
    "--critic-lr 1e-5 --min-lr 1e-4": "--critic-lr|--min-lr 0.0001 is above the critic's 1e-05",
    "--lr-decay-iters 5 --critic-lr-warmup-iters 5": "--critic-lr-warmup-iters|5 is not below the 5 steps",
    "--critic-load nowhere": "--critic-load|no folder nowhere",
    "--save out --critic-save out": "--critic-save|is also the folder of --critic-save",
    "--micro-batch-size 1 --critic-num-gpus-per-node 3": "--critic-num-gpus-per-node|do not divide among the critic's",
    "--megatron-config-path nowhere.yaml": "--megatron-config-path nowhere.yaml|No such file",
}


def test_a_critic_begins_with_the_flags_that_it_goes_on_with(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*PPO, "--critic-load", "new", "--critic-save", "./new"]
    assert arguments(folder, *words).critic_load is None
    Path("new").mkdir()  # a run that has ended before its first save
    assert arguments(folder, *words).critic_load is None
    Path("new/latest_checkpointed_iteration.txt").write_text("0")
    assert arguments(folder, *words).critic_load == "new"


@pytest.mark.parametrize("given", FLAGS)
def test_flags_that_a_critic_cannot_be_made_from(folder, given):
    with pytest.raises(ConfigError) as caught:
        arguments(folder, *PPO, *given.split())
    assert [w for w in FLAGS[given].split("|") if w not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    "given",
    ["--value-clip 0.1", "--critic-lr 1e-4", "--critic-load .", "--critic-save .", "--num-critic-only-steps 1"],
)
def test_without_ppo_there_is_no_critic(folder, given):
    with pytest.raises(ConfigError, match="no critic without PPO") as caught:
        arguments(folder, *given.split())
    assert given.split()[0] in str(caught.value)


def test_the_same_thing_is_not_said_twice(folder):
    with pytest.raises(ConfigError, match="--critic-lr sets it, too"):
        with_file(folder, roles(critic={"lr": 1e-5}), "--critic-lr", "1e-4")
    assert {"lr", "load", "save", "weight_decay"} < set(overridable())


def test_the_whole_run_may_train_the_critic_alone(folder):
    assert arguments(folder, *PPO, "--num-critic-only-steps", "9").num_critic_only_steps == 9
    assert arguments(folder, *PPO, "--n-samples-per-prompt", "1").n_samples_per_prompt == 1  # no group is needed
