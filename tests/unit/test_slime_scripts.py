"""The command lines of slime's published scripts/run-*.sh: the words that `train.py` gets in the newest of them.

data/slime_scripts.json holds them (as of August 2026, with its variables expanded and PATH for each path). Of none is
anything refused but what LEFT names; without it those of MODELS parse, with the config.json of the model.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.arguments.parser import scan
from instep.engines.flags import engine_words
from tests.command_line import make_folder
from tests.published import config

SCRIPTS = {n: w.split() for n, w in json.loads((Path(__file__).parent / "data/slime_scripts.json").read_text()).items()}
# Those of the families that are here, by the published model that each trains.
MODELS = {
    "run-qwen2.5-0.5B-gb10-smoke.sh": "qwen2.5-0.5B",
    "run-qwen2.5-0.5B-reproducibility.sh": "qwen2.5-0.5B",
    "run-qwen3-4B.sh": "qwen3-4B",
    "run-qwen3-4B-amd.sh": "qwen3-4B",
    "run-qwen3-4B-base-sft.sh": "qwen3-4B",
    "low_precision/run-qwen3-4b-fp8.sh": "qwen3-4B",
    "run-qwen3-32B.sh": "qwen3-32B",
    "run-qwen3-30B-A3B.sh": "qwen3-30B-A3B",
    "low_precision/run-qwen3-30B-A3B-int4.sh": "qwen3-30B-A3B",
    "low_precision/run-qwen3-30b-a3b-fp8.sh": "qwen3-30B-A3B",
    "run-qwen3-235B-A22B.sh": "qwen3-235B-A22B",
    "run-qwen3-235B-A22B-sft.sh": "qwen3-235B-A22B",
    "low_precision/run-qwen3-235B-A22B-int4.sh": "qwen3-235B-A22B",
    "run-deepseek-r1.sh": "deepseek-v3",
    "run-moonlight-16B-A3B.sh": "moonlight-16B-A3B",
    "run-qwen3-next-80B-A3B.sh": "qwen3-next-80B-A3B",
    "run-qwen3.5-27B.sh": "qwen3.5-27B",
    "run-qwen3.5-35B-A3B-sft.sh": "qwen3.5-35B-A3B",
    "low_precision/run-moonlight-16B-A3B-int4.sh": "moonlight-16B-A3B",
}
# What is refused in one script or another: other architectures, what `instep sft` does by
# itself, DeepEP and FP8, which are the hardware's, and SGLang's layouts, which vLLM's flags say in another way.
LEFT = set(
    """
    --model-name --post-self-attn-layernorm --post-mlp-layernorm --rotary-interleaved --allgather-cp
    --enable-experimental
    --disable-compute-advantages-and-returns
    --moe-enable-deepep --moe-token-dispatcher-type --fp8-format --fp8-recipe --transformer-impl
    """.split()
)
LEFT_BY_VLLM = LEFT | set(
    """
    --sglang-ep-size --sglang-expert-parallel-size --sglang-dp-size --sglang-enable-dp-attention --sglang-config
    --sglang-speculative-algorithm --sglang-speculative-eagle-topk --sglang-speculative-num-draft-tokens
    --sglang-speculative-num-steps --sglang-disaggregation-transfer-backend
    """.split()
)
FILES = {
    "--prompt-data": "data.jsonl",
    "--hf-checkpoint": "model",
    "--ref-load": "model",
    "--load": "out",
    "--save": "out",
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


def value(words: list[str], flag: str, default: str = "") -> str:
    return words[words.index(flag) + 1] if flag in words else default


def local(words: list[str]) -> list[str]:
    """The words with files of this folder as their paths."""
    found = list[str]()
    for word in words:
        flag = next((w for w in reversed(found) if w.startswith("--")), "")
        found.append(FILES.get(flag, "data.jsonl") if word == "PATH" else word)
    return found


def without(left: set[str], words: list[str]) -> list[str]:
    """The words without the flags `left` and their values."""
    found, kept = list[str](), True
    for word in words:
        kept = word not in left if word.startswith("--") else kept
        found += [word] * kept
    return found


def parsed(name: str, left: set[str], *more: str) -> Any:
    """The arguments of a script for a model that is here."""
    words = without(left | {"--spec"}, local(SCRIPTS[name]))  # which names slime's own layers of hybrid models
    Path("data.jsonl").write_text('{"prompt": "1 + 1", "label": "2", "messages": [{"role": "user", "content": "1"}]}\n')
    Path("model/config.json").write_text(json.dumps(config(MODELS[name])))
    return parse([*words, "--train-backend", "megatron", *more], "sft" if "sft_loss" in words else "train")


@pytest.mark.parametrize("name", MODELS)
def test_scripts_of_families_that_are_here_parse(name):
    """As they stand: their flags of SGLang mean engines of SGLang, and arrive there as they are."""
    words, args = SCRIPTS[name], parsed(name, LEFT)
    assert args.num_layers == int(value(words, "--num-layers"))
    assert args.cluster == ("ray" if args.actor_num_nodes > 1 else "local")
    engines = engine_words(args)
    typed = {word: value(words, word) for word in words if word.startswith("--sglang-")}
    assert args.rollout_backend == ("sglang" if typed else "auto")
    if "--sglang-mem-fraction-static" in typed:
        fraction = typed["--sglang-mem-fraction-static"]
        assert engines["mem_fraction_static"] == ["--mem-fraction-static", fraction]
        assert any(": means --rollout-backend sglang" in note for note in args.notes)


@pytest.mark.parametrize("name", [name for name in MODELS if "sft" not in name])
def test_they_parse_for_engines_of_vllm(name):
    words, args = SCRIPTS[name], parsed(name, LEFT_BY_VLLM, "--rollout-backend", "vllm")
    assert args.rollout_backend == "vllm" and not args.sglang_overrides
    assert args.vllm_overrides["gpu_memory_utilization"][-1] == value(words, "--sglang-mem-fraction-static")
    assert any("--sglang-mem-fraction-static: is read as --vllm-gpu-memory-util" in n for n in args.notes)


@pytest.mark.parametrize("more,left", [([], LEFT), (["--rollout-backend=vllm"], LEFT_BY_VLLM)], ids=["sglang", "vllm"])
def test_nothing_is_refused_but_what_is_known(more, left):
    problems = [p for words in SCRIPTS.values() for p in scan([*words, *more]).problems if p.refused]
    assert not [p for p in problems if p.what == "unknown flag"]
    specs = [p for p in problems if p.where == "--spec"]
    assert specs and all("names the module 'slime_plugins'" in p.what for p in specs)  # which is not installed here
    # One script names the file of --sglang-config by a variable.
    assert {p.where.split()[0] for p in problems} == left | {"--spec", "--sglang-config"}
