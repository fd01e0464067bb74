"""The command lines of slime's published scripts/run-*.sh: the words that `train.py` gets in the newest of them.

data/slime_scripts.json holds them (as of August 2026, with its variables expanded and PATH for each path). Those of
FAMILY parse; of the others nothing is refused but what LEFT names.
"""

import json
import re
from pathlib import Path

import pytest

from instep.arguments import parse
from instep.arguments.parser import scan
from tests.command_line import make_folder

SCRIPTS = {n: w.split() for n, w in json.loads((Path(__file__).parent / "data/slime_scripts.json").read_text()).items()}
FAMILY = {
    "run-qwen2.5-0.5B-gb10-smoke.sh": "qwen2",
    "run-qwen2.5-0.5B-reproducibility.sh": "qwen2",
    "run-qwen3-4B.sh": "qwen3",
    "run-qwen3-4B-amd.sh": "qwen3",
    "run-qwen3-32B.sh": "qwen3",
    "run-qwen3-30B-A3B.sh": "qwen3_moe",
}
# Layers of plugins and other architectures, multi-token prediction, SFT (a command of its own), DeepEP and FP8, which
# are the hardware's, and SGLang's layouts, which vLLM's flags say in another way.
LEFT = (
    "--(spec|model-name|use-gated-attention|apply-layernorm-1p|attention-output-gate|post-(self-attn|mlp)-layernorm)",
    "--(rotary-interleaved|moe-shared-expert-gate|allgather-cp|enable-experimental)",
    "--(mtp-num-layers|mtp-loss-scaling-factor|enable-mtp-training|disable-compute-advantages-and-returns)",
    "--(moe-enable-deepep|moe-token-dispatcher-type|fp8-format|fp8-recipe|transformer-impl)",
    "--sglang-(ep-size|expert-parallel-size|dp-size|enable-dp-attention|speculative-.*|disaggregation-.*|config)",
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


def config(words: list[str], model_type: str) -> dict[str, object]:
    """The config.json that the flags of the model's shape describe."""
    heads, width = int(value(words, "--num-attention-heads")), int(value(words, "--hidden-size"))
    experts = {
        "num_experts": "--num-experts",
        "num_experts_per_tok": "--moe-router-topk",
        "moe_intermediate_size": "--moe-ffn-hidden-size",
    }
    return {
        **{key: int(value(words, flag)) for key, flag in experts.items() if flag in words},
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "model_type": model_type,
        "num_hidden_layers": int(value(words, "--num-layers")),
        "hidden_size": width,
        "intermediate_size": int(value(words, "--ffn-hidden-size")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(value(words, "--num-query-groups", str(heads))),
        "head_dim": int(value(words, "--kv-channels", str(width // heads))),
        "vocab_size": int(value(words, "--vocab-size")),
        "rms_norm_eps": float(value(words, "--norm-epsilon")),
        "rope_theta": float(value(words, "--rotary-base")),
        "tie_word_embeddings": "--untie-embeddings-and-output-weights" not in words,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
    }


def local(words: list[str]) -> list[str]:
    """The words with files of this folder as their paths."""
    found = list[str]()
    for word in words:
        flag = next((w for w in reversed(found) if w.startswith("--")), "")
        found.append(FILES.get(flag, "data.jsonl") if word == "PATH" else word)
    return found


@pytest.mark.parametrize("name", FAMILY)
def test_scripts_of_families_that_are_here_parse(name):
    words = local(SCRIPTS[name])
    Path("data.jsonl").write_text('{"prompt": "1 + 1", "label": "2", "messages": [{"role": "user", "content": "1"}]}\n')
    Path("model/config.json").write_text(json.dumps(config(words, FAMILY[name])))
    args = parse([*words, "--train-backend", "megatron"])
    assert args.num_layers == int(value(words, "--num-layers"))
    assert args.vllm_overrides["gpu_memory_utilization"][-1] == value(words, "--sglang-mem-fraction-static")
    assert any("--sglang-mem-fraction-static: is read as --vllm-gpu-memory-utilization" in n for n in args.notes)


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_refused_but_what_is_known(name):
    problems = [p for p in scan(SCRIPTS[name]).problems if p.refused]
    refused = {p.where.split()[0] for p in problems}
    assert not [p for p in problems if p.what == "unknown flag"]
    assert {flag for flag in refused if not any(re.fullmatch(left, flag) for left in LEFT)} == set()
