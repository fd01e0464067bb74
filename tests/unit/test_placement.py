"""Where ranks and engines go: exact plans, and refusals."""

import importlib.util
import subprocess
import sys

import pytest

from instep.arguments.parse import parse
from instep.cli import main
from instep.cluster.placement import describe, make_plan
from instep.engines.spec import Slot
from instep.errors import ConfigError


def plan(words: str):
    return make_plan(parse(words.split(), "plan"))


def slots(node, gpus):
    return tuple(Slot(node, gpu) for gpu in gpus)


PPO = (
    "--advantage-estimator ppo --actor-num-nodes 1 --actor-num-gpus-per-node 4 --critic-num-nodes 1 "
    "--critic-num-gpus-per-node 4 --rollout-num-gpus 8"
)


def test_the_guides_ppo_example_takes_16_gpus():
    """vime's usage guide: 4 (actor) + 4 (critic) + 8 (rollout) = 16."""
    found = plan(PPO)
    assert found.actor == slots(0, range(4))
    assert found.critic == slots(0, range(4, 8))
    assert found.engines == tuple(slots(1, [gpu]) for gpu in range(8))
    assert found.num_gpus == 16 and found.nodes == [list(range(8)), list(range(8))]


def test_the_critic_is_as_large_as_the_actor_unless_told():
    found = plan("--advantage-estimator ppo --actor-num-gpus-per-node 4 --rollout-num-gpus 8 --actor-num-nodes 2")
    assert found.actor == slots(0, range(8)) and found.critic == slots(1, range(8))
    assert found.engines[0] == slots(2, [0])


def test_an_engine_of_two_nodes():
    """slime's and vime's guides: one model on 2 nodes and 16 GPUs is an engine of 16."""
    found = plan("--actor-num-gpus-per-node 8 --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16")
    assert found.actor == slots(0, range(8))
    assert found.engines == (slots(1, range(8)) + slots(2, range(8)),)
    assert describe(found) == [("actor ranks 0-7", 0, "0-7"), ("engine 0", 1, "0-7"), ("engine 0", 2, "0-7")]


def test_an_engine_of_two_nodes_begins_on_a_node_of_its_own():
    found = plan("--actor-num-gpus-per-node 4 --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16")
    assert found.nodes == [list(range(4)), list(range(8)), list(range(8))]


def test_separate_engines_stay_within_a_node():
    found = plan("--actor-num-gpus-per-node 6 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4")
    assert found.engines == (slots(1, range(4)), slots(1, range(4, 8)))
    assert found.nodes[0] == list(range(6)) and found.num_gpus == 14
    small = plan("--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2")
    assert small.engines == (slots(0, (4, 5)), slots(0, (6, 7))) and len(small.nodes) == 1


def test_the_actor_fills_node_after_node():
    found = plan("--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 2")
    assert found.actor == slots(0, range(8)) + slots(1, range(8))
    assert found.engines == (slots(2, [0]), slots(2, [1]))


def test_parts_of_a_run_alone_take_no_gpus_of_the_other():
    words = "--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2"
    rollouts = plan(words + " --debug-rollout-only")
    assert rollouts.actor == () and rollouts.nodes == [[0, 1, 2, 3]]
    assert rollouts.engines == ((Slot(0, 0), Slot(0, 1)), (Slot(0, 2), Slot(0, 3)))
    training = plan(words + " --debug-train-only")
    assert training.engines == () and training.nodes == [[0, 1, 2, 3]]
    assert plan(words + " --debug-train-only --colocate").engines == ()


def test_colocated_engines_take_the_trainers_gpus():
    args = parse(
        "--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 2 --rollout-num-gpus 3".split(), "plan"
    )
    found = make_plan(args)
    assert found.engines == tuple(slots(0, (gpu, gpu + 1)) for gpu in (0, 2, 4, 6))
    assert found.num_gpus == 8
    assert args.rollout_num_gpus == 8 and "--rollout-num-gpus 3 is ignored" in args.notes[0]


def test_colocated_engines_with_a_critic_take_its_gpus_too():
    found = plan(PPO + " --colocate --rollout-num-gpus-per-engine 4")
    assert found.engines == (found.actor, found.critic) and found.num_gpus == 8


def test_a_colocated_engine_of_two_nodes():
    found = plan("--colocate --actor-num-nodes 4 --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 16")
    assert found.engines == (found.actor[:16], found.actor[16:])


def test_nodes_of_another_size():
    found = plan(
        "--num-gpus-per-node 4 --actor-num-gpus-per-node 4 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 8"
    )
    assert found.engines == (slots(1, range(4)) + slots(2, range(4)),)


REFUSALS = [
    ("--actor-num-gpus-per-node 9", "9 GPUs are more than the 8 of a node"),
    ("--advantage-estimator ppo --critic-num-gpus-per-node 16", "--critic-num-gpus-per-node"),
    ("--rollout-num-gpus 24 --rollout-num-gpus-per-engine 12", "does not fill whole nodes of 8"),
    ("--rollout-num-gpus 6 --rollout-num-gpus-per-engine 4", "not a multiple of the 4 of an engine"),
    ("--colocate --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 8", "4 GPUs of the trainer"),
    ("--colocate --actor-num-nodes 3 --rollout-num-gpus-per-engine 6", "would cross the boundaries of nodes of 8"),
    ("--critic-num-nodes 2", "no critic without PPO"),
    ("--actor-num-gpu-per-node 9", "did you mean --actor-num-gpus-per-node"),
]


@pytest.mark.parametrize("words,text", REFUSALS)
def test_what_does_not_fit_is_refused(words, text):
    with pytest.raises(ConfigError) as caught:
        plan(words)
    assert text in str(caught.value) and caught.value.remedy


@pytest.fixture
def train(tmp_path):
    """Parses a training command line whose files exist."""
    (tmp_path / "data.jsonl").write_text('{"input": "1 + 1", "label": "2"}\n')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"0")
    base = f"--hf-checkpoint {tmp_path} --prompt-data {tmp_path}/data.jsonl --rollout-batch-size 32 --num-rollout 1 "
    base += "--rm-type math --label-key label --train-backend hf --rollout-num-gpus 1 "
    return lambda words: parse((base + words).split())


@pytest.mark.parametrize(
    "words,text",
    [
        ("--actor-num-gpus-per-node 1 --actor-num-nodes 2 --cluster local", "the local cluster is one host"),
        (
            "--advantage-estimator ppo --actor-num-gpus-per-node 1 --critic-num-nodes 2 --cluster local",
            "--critic-num-nodes",
        ),
        ("--actor-num-gpus-per-node 1 --ray-address local", "no effect without --cluster ray"),
        (
            "--actor-num-gpus-per-node 8 --cluster ray --weight-sync shm",
            "engine 0 is planned on another host than rank 0",
        ),
        ("--actor-num-gpus-per-node 9 --cluster ray", "9 GPUs are more than the 8 of a node"),
    ],
)
def test_train_refuses_before_anything_starts(train, words, text):
    with pytest.raises(ConfigError) as caught:
        train(words)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "words,flag",
    [
        ("--actor-num-nodes 2 --rollout-batch-size 128", "--actor-num-nodes"),
        ("--advantage-estimator ppo --critic-num-nodes 2 --rollout-batch-size 128", "--critic-num-nodes"),
    ],
)
def test_beyond_one_host_ray_is_the_default(train, words, flag, monkeypatch):
    args = train(words)
    assert args.cluster == "ray" and len(make_plan(args).nodes) > 2
    assert f"{flag}: asks for more than one host, so the run uses --cluster ray" in args.notes
    assert train("--actor-num-nodes 1").cluster == "local"
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else real(name))
    with pytest.raises(ConfigError) as caught:
        train(words)
    assert "Ray is not installed here" in str(caught.value) and flag in str(caught.value)


def test_train_takes_what_can_be_placed(train):
    args = train("--actor-num-gpus-per-node 8 --cluster ray")
    assert make_plan(args).engines == (slots(1, [0]),)
    assert train("--actor-num-gpus-per-node 1 --colocate").colocate


def test_without_ray_the_extra_is_named(train, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else real(name))
    with pytest.raises(ConfigError) as caught:
        train("--actor-num-gpus-per-node 1 --cluster ray")
    assert "Ray is not installed here" in str(caught.value) and "`instep install ray`" in str(caught.value)


def test_the_command_prints_a_table_and_starts_nothing(capsys):
    assert main(["plan", *PPO.split()]) == 0
    out = capsys.readouterr().out
    assert "16 GPUs on 2 nodes of 8" in out and "critic ranks 0-3" in out and "4-7" in out and "engine 7" in out
    assert main(["plan", "--help"]) == 0 and "nothing is started" in capsys.readouterr().out
    assert main(["plan", "--actor-num-gpus-per-node", "9"]) == 2
    code = "import sys; from instep.cli import main; main(['plan']); assert not {'torch', 'ray'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
