"""DeepSeek-V3 beside the trainer: the embedded engine's cache, sizes for the plan, flags of model scripts."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines
from instep.engines.embedded.model import Runner, load_model
from instep.models.shape import LatentAttention, model_shape
from instep.models.sizes import shape_in, shape_of
from instep.models.weight_map import weight_entries
from instep.preflight.plan.engine import plan_engine
from tests.command_line import CONFIG, argv, make_folder, refusal
from tests.distributed.megatron_layouts import MODELS, random_model

# config.json of the published DeepSeek-V3, V3.1 and R1, as far as shapes and flags go.
PUBLISHED = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu", "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "num_nextn_predict_layers": 1, "moe_layer_freq": 1,
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
MOONLIGHT = PUBLISHED | {
    "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "routed_scaling_factor": 2.446, "q_lora_rank": None, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "rope_theta": 50000, "rope_scaling": None,
}  # fmt: skip
SILENT = {"--kv-channels", "--moe-router-pre-softmax"}  # which neither Megatron nor instep reads here
SCRIPTS = Path(__file__).parent / "data/slime_scripts.json"


def model_flags(name: str) -> list[list[str]]:
    """The MODEL_ARGS of one of slime's scripts, each flag with its values."""
    words = json.loads(SCRIPTS.read_text())[name].split()
    words = words[words.index("--disable-bias-linear") : words.index("--hf-checkpoint")]
    flags: list[list[str]] = []
    for word in words:
        flags = [*flags, [word]] if word.startswith("--") else [*flags[:-1], [*flags[-1], word]]
    return flags


@pytest.mark.parametrize(
    ("script", "config", "silent"),
    [
        ("run-deepseek-r1.sh", PUBLISHED, SILENT),
        ("run-moonlight-16B-A3B.sh", MOONLIGHT, {*SILENT, "--mscale", "--mscale-all-dim"}),
    ],
)
def test_flags_of_slimes_scripts_agree_with_config_json(script, config, silent, tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    Path("model/config.json").write_text(json.dumps(config))
    flags = model_flags(script)
    args = parse([*argv("--train-backend megatron"), *(word for flag in flags for word in flag)])
    assert args.moe_router_bias_update_rate == 0 and args.moe_router_dtype == "fp32" and args.kv_lora_rank == 512
    first = config["first_k_dense_replace"]
    assert args.moe_layer_freq == (0,) * first + (1,) * (config["num_hidden_layers"] - first)
    assert {note.split(":")[0] for note in args.notes if "is not compared" in note} == silent


WRONG = {
    "--q-lora-rank": 1535, "--kv-lora-rank": 256, "--qk-head-dim": 192, "--qk-pos-emb-head-dim": 32, "--v-head-dim": 64,
    "--rotary-scaling-factor": 4, "--mscale": 0.7, "--mscale-all-dim": 0.7, "--moe-layer-freq": "[0]*2+[1]*59",
    "--moe-shared-expert-intermediate-size": 4096, "--moe-router-score-function": "softmax",
    "--moe-router-num-groups": 4, "--moe-router-group-topk": 2, "--moe-router-topk-scaling-factor": 1.0,
    "--num-experts": 128,
}  # fmt: skip


def test_each_flag_that_contradicts_config_json_is_named(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    Path("model/config.json").write_text(json.dumps(PUBLISHED))
    text = refusal("--train-backend megatron " + " ".join(f"{flag} {value}" for flag, value in WRONG.items()))
    for flag in WRONG:
        assert f"{flag}: is " in text and "config.json says" in text, flag
    assert parse(argv("--train-backend megatron --moe-layer-freq [0]*3+[1]*58")).notes == []
    Path("model/config.json").write_text(json.dumps({**CONFIG, "model_type": "qwen3"}))
    text = refusal("--train-backend megatron --multi-latent-attention --moe-router-bias-update-rate 0.1")
    assert "--multi-latent-attention: is True, but config.json says False" in text
    assert "the model's experts have no bias" in text


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type seq_aux_loss", "has no loss, so"),
        ("--moe-router-load-balancing-type sinkhorn", "is not one of aux_loss, seq_aux_loss, none"),
        ("--moe-layer-freq [0]*3+[2]*58", "is neither a number nor a list"),
    ],
)
def test_what_this_router_does_not_do_is_refused(words, what, tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    Path("model/config.json").write_text(json.dumps(PUBLISHED))
    text = refusal("--train-backend megatron " + words)
    assert what in text and "things are wrong" not in text
    notes = parse(argv("--train-backend megatron --moe-router-enable-expert-bias")).notes
    assert len(notes) == 1 and "Megatron changes it by 0.001" in notes[0]


def test_the_published_configuration_has_a_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    shape = model_shape(AutoConfig.from_pretrained(tmp_path))
    assert shape.latent == LatentAttention(1536, 512, 128, 64, 128) and shape.kv_channels == 192
    assert shape.rope["factor"] == 40 and shape.rope["rope_theta"] == 10000 and shape.num_mtp_layers == 1
    assert shape.experts is not None and shape.experts.layers == tuple(range(3, 61)) and shape.experts.scale == 2.5
    assert (shape.experts.num_groups, shape.experts.num_active_groups) == (8, 4)
    tensors = [size for entry in weight_entries(shape) for size in entry.shapes]
    assert sum(prod(size) for size in tensors) == 671_026_419_200


def test_the_plan_counts_its_parameters(tmp_path, monkeypatch):
    """671 billion, of which a token is multiplied with 37 less the input embedding (2412.19437, section 4.2)."""
    make_folder(tmp_path, monkeypatch)
    shape = shape_in(PUBLISHED)
    assert shape is not None and shape.total == 671_026_419_200 and shape.used == 36_625_618_432
    assert shape.experts == 58 * 256 * 3 * 7168 * 2048
    args = parse(argv("--rollout-backend vllm --rollout-max-response-len 96 --rollout-max-prompt-len 32"), "plan")
    planned = plan_engine(args, plan_engines(args)[0], shape, 80e9)
    assert planned.per_request == planned.longest * 61 * (512 + 64) * 2, "on every rank one latent vector, in bfloat16"
    for name in ("deepseek", "deepseek-plain"):
        model = random_model(MODELS[name])
        model.save_pretrained(tmp_path / name)
        stored = load_file(tmp_path / name / "model.safetensors")
        total = sum(tensor.numel() for tensor in stored.values())
        shape = shape_in(json.loads((tmp_path / name / "config.json").read_text()))
        assert shape is not None and shape.total == total, name
        more = {name.replace("layers.1.", "layers.2."): t.clone() for name, t in stored.items() if "layers.1." in name}
        save_file(stored | more, tmp_path / name / "model.safetensors", {"format": "pt"})
        shape_of.cache_clear()
        shape = shape_of(str(tmp_path / name))
        assert shape is not None and shape.total == total, "layers of multi-token prediction do not count"


def test_the_embedded_engine_caches_latent_vectors(tmp_path):
    plain = random_model(MODELS["deepseek"]).eval()
    plain.save_pretrained(tmp_path)
    runner = Runner(load_model(str(tmp_path), torch.float32, torch.device("cpu"), 64, False), 4, 64)
    rows = [[1, 2, 3, 4, 5], [6, 7, 8]]
    with torch.no_grad():
        got = [runner.prefill(rows, [0, 1], 0)]
        for token in (9, 3):
            rows = [[*row, token] for row in rows]
            got.append(runner.decode([token, token], [len(row) for row in rows]))
        for n, scores in enumerate(got):
            for row, score in zip(rows, scores, strict=True):
                whole = torch.tensor([row[: len(row) - 2 + n]])
                torch.testing.assert_close(score, plain(whole).logits[0, -1], atol=1e-5, rtol=1e-5)
