"""What is wrong with a command line about engines, or a `--vllm-config`: found before anything starts, and told."""

from pathlib import Path

import pytest

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.errors import ConfigError
from tests.plans import DISAGGREGATED, GUIDE, arguments, refusal, slots


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


TRAIN = (
    "--hf-checkpoint model --prompt-data data.jsonl --rollout-batch-size 4 --num-rollout 1 --rm-type math "
    "--label-key label --actor-num-gpus-per-node 1 "
)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"input": "1 + 1", "label": "2"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "model/model.safetensors").write_bytes(b"0")


def train_refusal(words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse((TRAIN + words).split(), "train")
    return str(caught.value)


def test_the_local_cluster_is_one_node_of_any_size(files):
    words = "--rollout-num-gpus 24 --rollout-num-gpus-per-engine 12"
    assert "12 are no multiple of PP 1 x DP 5 = 5" in train_refusal(words + " --vllm-data-parallel-size 5")
    args = parse(["--num-gpus-per-node", "12", *(TRAIN + words).split()], "plan").replace(planned=False)
    assert [e.slots for e in plan_engines(args)] == [slots(0, range(1, 13)), slots(0, range(13, 25))]


def test_models_that_are_not_there(files):
    arguments("", GUIDE)
    text = train_refusal("--vllm-config topology.yaml")
    assert "/path/to/ref_model is not a Hugging Face folder" in text and "vllm[1].model_path" in text


def test_the_trained_model_is_named_as_requests_name_it(files):
    config = "vllm: [{name: actor, model_path: ./model/, server_groups: [{num_gpus: 1}]}]"
    Path("topology.yaml").write_text(config)
    args = parse((TRAIN + "--vllm-config topology.yaml").split(), "train")
    assert [engine.path for engine in plan_engines(args)] == ["model"]


REFERENCE = "vllm: [{name: actor, server_groups: [{num_gpus: 1}]}, {name: ref, model_path: model, update_weights: "


@pytest.mark.parametrize(
    "words,frozen,what",
    [
        ("--use-kl-loss --ref-served-model other", "false", "no such model is served"),
        ("--use-kl-loss --ref-served-model ref", "true", "gets the trainer's weights, so it cannot be the reference"),
        ("--ref-served-model ref", "false", "there is no reference without a KL"),
        ("--kl-coef 0.1 --ref-served-model ref --ref-load model", "false", "there is one reference"),
        ("--kl-coef 0.1 --ref-served-model ref --ref-update-interval 2", "false", "there is one reference"),
        ("--kl-coef 0.1 --ref-served-model ref --rollout-temperature 0.8", "false", "at temperature 1"),
        ("--kl-coef 0.1 --ref-served-model ref --load-debug-rollout-data x", "false", "has no engine or no trainer"),
    ],
)
def test_references_that_are_refused(files, words, frozen, what):
    Path("topology.yaml").write_text(f"{REFERENCE}{frozen}, server_groups: [{{num_gpus: 1}}]}}]")
    assert what in train_refusal(f"--vllm-config topology.yaml {words}")


def test_a_reference_without_the_file_is_refused(files):
    assert "no such model is served" in train_refusal("--use-kl-loss --ref-served-model ref")


# ---- what is wrong ---------------------------------------------------------------------------------------------------

FILES = [
    ("sglang: []", "sglang", "unknown key"),
    ("vllm: {}", "vllm", "is no list of models"),
    ("- 1", "topology.yaml", "is no mapping"),
    ("vllm: [{name: a", "topology.yaml", "is not YAML"),
    ("vllm: [{name: a, server_group: []}]", "vllm[0].server_group", "did you mean server_groups?"),
    ("vllm: [{name: a, server_groups: [{num_gpu: 1}]}]", "server_groups[0].num_gpu", "did you mean num_gpus?"),
    ("vllm: [{name: a, server_groups: [{num_gpus: 0}]}]", "num_gpus", "0 is no whole number from 1 to 32768"),
    ("vllm: [{name: a, server_groups: [{}]}]", "vllm[0].server_groups[0].num_gpus", "is missing"),
    ("vllm: [{server_groups: [{num_gpus: 1}]}]", "vllm[0].name", "is missing"),
    ("vllm: [{name: a}]", "vllm[0].server_groups", "is no list of groups"),
    ("vllm: [{name: a, server_groups: [{num_gpus: 6, num_gpus_per_engine: 4}]}]", "num_gpus", "no multiple of the 4"),
    ("vllm: [{name: a, server_groups: [{worker_type: encode, num_gpus: 1}]}]", "worker_type", "did you mean decode?"),
    ("vllm: [{name: a, server_groups: [{worker_type: prefill, num_gpus: 1}]}]", "server_groups", "no decode group"),
    (
        "vllm: [{name: a, server_groups: [{worker_type: placeholder, num_gpus: 1}]}]",
        "server_groups",
        "only placeholders",
    ),
    (
        "vllm: [{name: a, server_groups: [{num_gpus: 1, overrides: {seed: 1}}]}]",
        "overrides.seed",
        "each sample has a seed of its own",
    ),
    (
        "vllm: [{name: a, server_groups: [{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 1}, "
        "{num_gpus: 1}]}]",
        "server_groups",
        "make two models of them",
    ),
    (
        "vllm: [{name: a, server_groups: [{num_gpus: 1, overrides: {max_model_length: 4}}]}]",
        "vllm[0].server_groups[0].overrides.max_model_length",
        "did you mean max_model_len?",
    ),
    (
        "vllm: [{name: a, server_groups: [{num_gpus: 1, overrides: {enforce_eager: 1}}]}]",
        "overrides.enforce_eager",
        "1 is neither true nor false",
    ),
    (
        "vllm: [{name: a, server_groups: [{num_gpus: 1, overrides: {tensor_parallel_size: 2}}]}]",
        "overrides.tensor_parallel_size",
        "use --rollout-num-gpus-per-engine",
    ),
    (
        "vllm: [{name: a, server_groups: [{num_gpus: 4, num_gpus_per_engine: 4, overrides: {data_parallel_size: 3}}]}]",
        "vllm[0]",
        "the GPUs of an engine are TP x PP x DP, but 4 are no multiple of PP 1 x DP 3 = 3",
    ),
    (
        "vllm: [{name: a, server_groups: [{num_gpus: 24, num_gpus_per_engine: 12}]}]",
        "vllm[0]",
        "does not fill whole nodes of 8",
    ),
    (
        "vllm: [{name: ref, model_path: other, server_groups: [{num_gpus: 1}]}]",
        "vllm[0].update_weights",
        "the trainer's weights would replace those of other",
    ),
    (
        "vllm: [{name: a, server_groups: [{num_gpus: 1}]}, {name: a, server_groups: [{num_gpus: 1}]}]",
        "vllm",
        "two models are named 'a'",
    ),
]


@pytest.mark.parametrize("config,where,what", FILES, ids=[what for _, _, what in FILES])
def test_files_that_are_wrong(config, where, what):
    text = refusal("", config)
    assert "--vllm-config topology.yaml" in text and where in text and what in text


def test_everything_wrong_with_a_file_is_told_at_once():
    text = refusal("", "vllm: [{nam: a, server_groups: [{num_gpus: x, worker_typ: regular, overrides: {moe: 1}}]}]")
    assert "5 things are wrong" in text
    for key in ("vllm[0].nam:", "vllm[0].name:", "num_gpus:", "worker_typ:", "overrides.moe:"):
        assert key in text


COMBINATIONS = [
    ("--rollout-num-gpus 8", GUIDE, "8, but the groups of topology.yaml take 12"),
    ("--prefill-num-servers 1", GUIDE, "the file says which engines prefill"),
    ("--vllm-router-ip 10.0.0.1 --vllm-router-port 1", GUIDE, "each of the 2 models needs its own router"),
    ("--vllm-router-ip 10.0.0.1", "", "only one is given"),
    ("--rollout-backend embedded", GUIDE, "num_gpus_per_engine: 4 GPUs, but the embedded engine uses one"),
    ("--rollout-backend embedded", DISAGGREGATED, "worker_type: the embedded engine prefills and decodes"),
    ("--rollout-backend embedded", DISAGGREGATED, "does not have this, only max_model_len, max_num_seqs, dtype"),
    (
        "--rollout-backend embedded",
        "vllm: [{name: a, server_groups: [{num_gpus: 1, overrides: {max_model_len: 2k}}]}]",
        "the embedded engine takes a whole number",
    ),
    ("--rollout-backend embedded --prefill-num-servers 1", "", "the embedded engine does not have this"),
    (
        "--rollout-num-gpus 2 --prefill-num-servers 1 --vllm-router-ip 10.0.0.1 --vllm-router-port 1",
        "",
        "a router takes prefill and decode engines only when it starts",
    ),
    ("--prefill-num-servers 2 --rollout-num-gpus 2", "", "2 of 2 engines prefill: no engine is left to decode"),
    ("--vllm-data-parallel-size 3 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 8", "", "PP 1 x DP 3 = 3"),
    ("--vllm-pipeline-parallel-size 0", "", "pipeline_parallel_size is 0"),
    (
        "--num-gpus-per-node 6 --actor-num-gpus-per-node 6 --rollout-num-gpus 12 --rollout-num-gpus-per-engine 12 "
        "--vllm-data-parallel-size 3",
        "",
        "3 data-parallel replicas of 4 GPUs do not fit evenly on nodes of 6",
    ),
]


@pytest.mark.parametrize("words,config,what", COMBINATIONS, ids=[what for _, _, what in COMBINATIONS])
def test_what_does_not_go_together(words, config, what):
    text = refusal(words, config)
    assert what in text
    assert "remedy" in text or "->" in text


def test_a_file_that_is_not_there():
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parse(["--vllm-config", "nowhere.yaml"], "plan")
