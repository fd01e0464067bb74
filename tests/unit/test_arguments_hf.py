"""Megatron's flags and those of later work: each acts, is compared with config.json, is noted, or is refused."""

import json
from pathlib import Path

import pytest

from instep.arguments.all_flags import find
from instep.arguments.megatron import SHAPE
from instep.arguments.model import MODEL
from instep.arguments.parallel import PARALLEL
from instep.arguments.parse import parse
from tests.command_line import CONFIG, argv, make_folder, refusal


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


HF = "--train-backend hf "
# With hf, on the configuration CONFIG of a model whose family is not known: what becomes of a value.
ACTS, SAYS, NOTED = "acts", "config.json says", "noted"
SHAPES = {
    "--num-layers 4": ACTS,
    "--num-layers 5": "is 5, but config.json says 4",
    "--hidden-size 65": SAYS,
    "--ffn-hidden-size 129": SAYS,
    "--num-attention-heads 8": SAYS,
    "--group-query-attention": ACTS,
    "--num-query-groups 4": SAYS,
    "--kv-channels 32": SAYS,
    "--vocab-size 301": SAYS,
    "--normalization LayerNorm": "is LayerNorm, but config.json says RMSNorm",
    "--norm-epsilon 1e-5": SAYS,
    "--rotary-base 1000000": SAYS,
    "--rotary-percent 0.5": NOTED,
    "--position-embedding-type rope": ACTS,
    "--use-rotary-position-embeddings": ACTS,
    "--swiglu": ACTS,
    "--qk-layernorm": NOTED,
    "--disable-bias-linear": NOTED,
    "--add-qkv-bias": NOTED,
    "--untie-embeddings-and-output-weights": "is True, but config.json says False",
    "--make-vocab-size-divisible-by 64": NOTED,
    "--seq-length 1": NOTED,
    "--max-position-embeddings 9": NOTED,
    "--attention-dropout 0.1": "at most 0",
    "--hidden-dropout 0.1": "at most 0",
    "--accumulate-allreduce-grads-in-fp32": NOTED,
    "--no-check-for-nan-in-loss-and-grad": NOTED,
    "--no-gradient-accumulation-fusion": NOTED,
    "--tensor-model-parallel-size 1": ACTS,
    "--tensor-model-parallel-size 2 --actor-num-gpus-per-node 2": ACTS,
    "--sequence-parallel --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2": NOTED,
    "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2": "has no pipelines",
    "--context-parallel-size 2 --actor-num-gpus-per-node 2": "has no context parallelism",
    "--num-virtual-stages-per-pipeline-rank 2": "has no pipelines",
    "--num-layers-per-virtual-pipeline-stage 1": "has no pipelines",
    "--decoder-first-pipeline-num-layers 1": "has no pipelines",
    "--decoder-last-pipeline-num-layers 1": "has no pipelines",
    "--expert-model-parallel-size 2": "has no expert parallelism",
    "--expert-tensor-parallel-size 2": "has no expert parallelism",
    "--moe-aux-loss-coeff 0.1": "only megatron-core has it",
    "--moe-z-loss-coeff 0.1": "only megatron-core has it",
    "--moe-router-dtype fp32": "only megatron-core has it",
    "--moe-grouped-gemm": "only megatron-core has it",
    "--use-routing-replay": "only megatron-core has it",
    "--use-rollout-routing-replay": "only megatron-core has it",
    "--num-experts 8": NOTED,
    "--moe-router-topk 2": NOTED,
    "--moe-ffn-hidden-size 8": NOTED,
    "--multi-latent-attention": NOTED,
    "--q-lora-rank 8": NOTED,
    "--kv-lora-rank 8": NOTED,
    "--qk-head-dim 8": NOTED,
    "--qk-pos-emb-head-dim 8": NOTED,
    "--v-head-dim 8": NOTED,
    "--rotary-scaling-factor 1": ACTS,
    "--rotary-scaling-factor 40": "is 40.0, but config.json says 1.0",
    "--mscale 1": NOTED,
    "--mscale-all-dim 1": NOTED,
    "--moe-layer-freq [0]*1+[1]*3": NOTED,
    "--moe-layer-freq 1e3": "is neither a number nor a list",
    "--moe-shared-expert-intermediate-size 8": NOTED,
    "--moe-router-pre-softmax": NOTED,
    "--attention-output-gate": NOTED,
    "--apply-layernorm-1p": NOTED,
    "--moe-shared-expert-gate": NOTED,
    "--moe-router-score-function sigmoid": NOTED,
    "--moe-router-enable-expert-bias": NOTED,
    "--moe-router-num-groups 2": NOTED,
    "--moe-router-group-topk 1": NOTED,
    "--moe-router-topk-scaling-factor 2.5": NOTED,
    "--moe-router-load-balancing-type seq_aux_loss": ACTS,
    "--moe-router-bias-update-rate 0.001": "only megatron-core has it",
    "--sequence-parallel": NOTED,
    "--use-distributed-optimizer": "FSDP2 spreads the optimizer anyway",
    "--recompute-granularity full": ACTS,
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": ACTS,
    "--recompute-granularity selective": ACTS,
    "--recompute-method block --recompute-granularity full": "layer by layer",
    "--recompute-num-layers 2 --recompute-granularity full": "layer by layer",
    "--ckpt-format torch_dist": ACTS,
    "--custom-model-provider-path json.loads": "is called by Megatron's ranks alone",
    "--spec json loads": "is called by Megatron's ranks alone",
    "--custom-megatron-init-path json.loads": "is called by Megatron's ranks alone",
    "--custom-megatron-before-log-prob-hook-path json.loads": "is called by Megatron's ranks alone",
    "--custom-megatron-before-train-step-hook-path json.loads": "is called by Megatron's ranks alone",
    "--attention-softmax-in-fp32": NOTED,
    "--overlap-grad-reduce": "only megatron-core has it",
}


@pytest.mark.parametrize("words,outcome", SHAPES.items(), ids=lambda text: text.replace(" ", "_"))
def test_every_flag_of_megatron_with_hf(words: str, outcome: str):
    if outcome in (ACTS, NOTED):
        notes = parse(argv(HF + words)).notes
        assert any(words.split()[0] in note for note in notes) == (outcome == NOTED), notes
    else:
        text = refusal(HF + words)
        assert outcome in text and words.split()[0] in text and "things are wrong" not in text


def test_no_flag_of_megatron_is_left_out_above():
    tried = {words.split()[0] for words in SHAPES}
    assert {f.name for group in (PARALLEL, SHAPE) for f in group.flags if f.status == "acts"} <= tried


OF_BOTH = """
--hf-checkpoint --trust-remote-code --load --save --save-interval --ref-load --ckpt-step --save-hf --no-save-optim
--no-load-optim --finetune --ref-ckpt-step --start-rollout-id --async-save --ckpt-format --only-train-params-name-list
--freeze-params-name-list --chat-template --config --dump-config
"""


def test_flags_of_the_model_act_in_the_controller_and_the_workers_of_both_backends():
    acting = {f.name for f in MODEL.flags if f.status == "acts"} - {"--train-backend"}
    alone = "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.1"
    assert refusal(HF + alone).count("only megatron-core has it, not --train-backend hf") == 3
    acting -= {word for word in alone.split() if word.startswith("--")}
    assert acting == set(OF_BOTH.split()), "does a new flag of the model act with hf, too?"


FILES = [  # more keys of config.json, flags, what is wrong with them
    ({"mlp_bias": True}, "--disable-bias-linear", "is True, but config.json says False"),
    ({"attention_bias": False}, "--disable-bias-linear", ""),
    ({"model_type": "llama"}, "--disable-bias-linear --rotary-percent 1.0", ""),
    ({"model_type": "llama", "mlp_bias": True}, "--disable-bias-linear", "is True, but config.json says False"),
    ({"model_type": "llama"}, "--qk-layernorm", "is True, but config.json says False"),
    ({"model_type": "qwen3"}, "--add-qkv-bias", "is True, but config.json says False"),
    ({"num_key_value_heads": 4}, "--group-query-attention", "is True, but config.json says False"),
    ({"partial_rotary_factor": 0.5}, "--rotary-percent 0.5", ""),
    ({"rotary_pct": 0.25}, "--rotary-percent 1.0", "is 1.0, but config.json says 0.25"),
    ({"rope_parameters": None, "position_embedding_type": "absolute"}, "--position-embedding-type rope", "absolute"),
    ({"hidden_act": "gelu"}, "--swiglu", "is True, but config.json says False"),
]


@pytest.mark.parametrize("more,words,what", FILES)
@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_the_shape_is_compared_with_config_json(backend: str, more: dict, words: str, what: str):
    Path("model/config.json").write_text(json.dumps({**CONFIG, **more}))
    words = f"--train-backend {backend} {words}"
    if what:
        assert what in refusal(words)
    else:
        assert parse(argv(words)).notes == []


NEUTRAL = """
--attention-backend flash --cp-comm-type p2p --moe-token-dispatcher-type alltoall
--update-weight-mode full --transformer-impl local --cpu-offloading-num-layers 0 --lr-warmup-samples 0
"""
NOT_NEUTRAL = [
    ("--context-parallel-size 2 --train-backend hf", "the hf backend has no context parallelism"),
    ("--cp-comm-type a2a", "refused: context-parallel ranks gather keys and values"),
    ("--moe-token-dispatcher-type flex", "refused: tokens are sent by alltoall"),
    ("--delay-wgrad-compute", "later: tokens are sent to experts without overlap with computation"),
    ("--cpu-offloading-num-layers 2", "refused: needs Transformer Engine"),
    ("--attention-backend fused", "refused: instep chooses the attention kernel by device"),
    ("--update-weight-mode delta", "later: --weight-sync says how weights are sent"),
    ("--transformer-impl transformer_engine", "refused: needs Transformer Engine"),
]


@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_neutral_values_of_flags_that_do_not_act_are_accepted(backend: str):
    """slime's public scripts have them in every run."""
    args = parse(argv(NEUTRAL + f"--tensor-model-parallel-size 1 --train-backend {backend}"))
    assert args == parse(argv(f"--train-backend {backend}"))
    for words in NEUTRAL.split():
        assert not words.startswith("--") or find(words).status != "acts"


@pytest.mark.parametrize("words,why", NOT_NEUTRAL)
def test_other_values_are_refused_with_the_reason(words: str, why: str):
    assert why in refusal(words)


def test_the_flags_that_slimes_scripts_have_for_a_dense_model():
    """From scripts/run-qwen3-4B.sh, but paths, wandb and engines."""
    script = """
    --rm-type math --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 8 --rollout-max-response-len 8192
    --rollout-temperature 1 --rollout-shuffle --apply-chat-template --global-batch-size 32 --balance-data
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
    --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.98 --attention-dropout 0.0 --hidden-dropout 0.0 --attention-softmax-in-fp32
    --accumulate-allreduce-grads-in-fp32 --attention-backend flash --actor-num-nodes 1 --actor-num-gpus-per-node 4
    --colocate
    """
    assert parse(argv(script)).tensor_model_parallel_size == 2
