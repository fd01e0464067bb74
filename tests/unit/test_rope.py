"""Rotary positions that transformers changes with the longest sequence of a batch are fixed, by vLLM's convention."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Phi3Config, PretrainedConfig, Qwen3Config

from instep.arguments.parse import parse
from instep.arguments.rollout import context_of_model
from instep.cluster.launch import LocalCluster
from instep.engines.embedded.model import Runner, load_model
from instep.errors import ConfigError
from instep.models.rope import context_length, fix_rope
from instep.models.shape import model_shape
from instep.training import packing
from instep.training.hf.model import Policy
from instep.types import TokenBatch

ORIGINAL, LONGEST = 16, 64
TINY: dict[str, Any] = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=LONGEST, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.7 * i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def phi3() -> Phi3Config:
    return Phi3Config(**TINY, rope_parameters=copy.deepcopy(LONGROPE), original_max_position_embeddings=ORIGINAL)


def llama(**rope: Any) -> LlamaConfig:
    return LlamaConfig(**{**TINY, "max_position_embeddings": ORIGINAL}, rope_parameters={**DYNAMIC, **rope})


def plain(config: PretrainedConfig) -> Any:
    """The model as transformers has it, with weights that make the positions matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def scored(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        log_p = model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return log_p.gather(1, tokens[1:, None])[:, 0]


def packed(policy: Policy, *samples: torch.Tensor) -> list[torch.Tensor]:
    """Log-probs of each sample's tokens but the first, all samples in one stream."""
    lengths = torch.tensor([len(s) for s in samples])
    batch = TokenBatch(torch.cat(samples), lengths, lengths - 1, {}, {"temperature": torch.ones(len(samples))})
    bounds, longest = packing.cu_seqlens(batch)
    at = (
        packing.position_ids(batch),
        bounds,
        longest,
        packing.response_positions(batch),
        packing.response_targets(batch),
    )
    with torch.no_grad():
        out = policy(batch.tokens, *at, packing.response_temperatures(batch), False, check=True)
    return list(out[0].split((lengths - 1).tolist()))


def policy_of(model: Any, config: PretrainedConfig, max_model_len: int | None) -> Policy:
    policy = Policy(config, torch.float32, max_model_len=max_model_len)
    policy.model.load_state_dict(model.state_dict())
    return policy


SHORT, LONG = torch.arange(3, 13), torch.arange(40) * 7 % 47 + 3
CASES = {"longrope, long": (phi3, LONGEST), "longrope, short": (phi3, ORIGINAL), "dynamic": (llama, None)}


@pytest.mark.parametrize("case", CASES)
def test_log_probs_do_not_depend_on_the_neighbours_in_the_pack(case: str):
    make, limit = CASES[case]
    model = plain(make())
    policy = policy_of(model, make(), limit)
    alone, together = packed(policy, SHORT)[0], packed(policy, SHORT, LONG)[0]
    torch.testing.assert_close(alone, together, rtol=0, atol=2e-5)
    # transformers itself takes other frequencies for the short sample where a long one stands beside it
    both = torch.nn.functional.pad(SHORT, (0, len(LONG) - len(SHORT)))
    assert (scored(model, both)[: len(SHORT) - 1] - scored(model, SHORT)).abs().max() > 1e-2


def test_long_factors_where_long_sequences_are_possible_else_short_ones():
    model = plain(phi3())
    (long,) = packed(policy_of(model, phi3(), LONGEST), LONG)
    torch.testing.assert_close(long, scored(model, LONG), rtol=0, atol=2e-5)
    for limit in (ORIGINAL, None):
        (short,) = packed(policy_of(model, phi3(), limit), SHORT)
        torch.testing.assert_close(short, scored(model, SHORT), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (phi3().to_dict(), ORIGINAL),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 16}, 16),
        (llama().to_dict(), 4 * ORIGINAL),  # vLLM stretches the length of these
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"full": {"rope_type": "linear", "factor": 2.0}}}, 128),
        ({"n_positions": 32}, 32),
        ({}, None),
    ],
)
def test_the_context_is_that_of_vllm(config: dict[str, Any], length: int | None):
    assert context_length(config, None) == length and context_length(config, 7) == 7


def test_dynamic_keeps_the_frequencies_of_its_own_length():
    model = plain(llama())
    (short,) = packed(policy_of(model, llama(), None), SHORT)
    torch.testing.assert_close(short, scored(model, SHORT), rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_embedded_engine_has_the_same(case: str, tmp_path: Path):
    make, limit = CASES[case]
    model = plain(make())
    model.save_pretrained(tmp_path)
    runner = Runner(load_model(str(tmp_path), torch.float32, torch.device("cpu"), limit or ORIGINAL, False), 2, LONGEST)
    policy = policy_of(model, make(), limit)
    for tokens in (SHORT, LONG, SHORT):
        scores = [own[1] for own, *_ in runner.score(tokens.tolist())]
        assert scores == pytest.approx(packed(policy, tokens)[0].tolist(), abs=2e-5)


@pytest.mark.parametrize("more", [{"max_trained_positions": 8}, {"alpha": 2.0}])
def test_what_cannot_be_fixed_is_refused(more: dict[str, float]):
    with pytest.raises(ConfigError, match=f"interpret {next(iter(more))} differently") as error:
        Policy(llama(**more), torch.float32)
    assert "rope_parameters of config.json" in error.value.where


@pytest.mark.parametrize(
    ("more", "named"), [({"attention_factor": 1.3}, "attention_factor"), ({"factor": 8.0}, "factor 8.0, not 4 =")]
)
def test_explicit_factors_of_longrope_are_refused_by_name(more: dict[str, float], named: str):
    config = phi3()
    config.rope_parameters.update(more)
    with pytest.raises(ConfigError, match=named):
        Policy(config, torch.float32)
    config.rope_parameters = {**LONGROPE, "factor": LONGEST / ORIGINAL}  # says what holds anyway
    Policy(config, torch.float32)


def test_rotary_parameters_by_layer_type_are_fixed_layer_by_layer():
    own = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": ORIGINAL}
    by_layer = {
        "full_attention": {**DYNAMIC},
        "sliding_attention": {**own, "short_factor": LONGROPE["short_factor"], "long_factor": LONGROPE["long_factor"]},
    }
    config = Gemma3TextConfig(
        **{**TINY, "max_position_embeddings": ORIGINAL}, head_dim=16, sliding_window=LONGEST,
        layer_types=["full_attention", "sliding_attention"], rope_parameters=by_layer,
    )  # fmt: skip
    model, fixed = plain(copy.deepcopy(config)), plain(copy.deepcopy(config))
    fix_rope(fixed, LONGEST)
    both = torch.nn.functional.pad(SHORT, (0, len(LONG) - len(SHORT)))
    for one, least, most in ((model, 1e-2, float("inf")), (fixed, 0.0, 2e-5)):
        moved = (scored(one, both)[: len(SHORT) - 1] - scored(one, SHORT)).abs().max()
        assert least <= moved <= most
    with pytest.raises(ConfigError, match="by layer type"):
        model_shape(Qwen3Config(**TINY, rope_parameters={"full_attention": DYNAMIC, "sliding_attention": DYNAMIC}))


def folder_of(config: PretrainedConfig, folder: Path) -> Path:
    config.architectures = ["Phi3ForCausalLM"]
    config.save_pretrained(folder)
    (folder / "model.safetensors").touch()
    (folder / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    return folder


GROUPS = """
vllm:
  - name: actor
    server_groups:
      - {num_gpus: 1, overrides: {max_model_len: %s}}
      - {num_gpus: 1, overrides: {max_model_len: %s}}
  - {name: judge, model_path: %s, update_weights: false, server_groups: [{num_gpus: 1, overrides: {max_model_len: 8}}]}
"""


def test_engines_and_trainer_have_one_context(tmp_path: Path):
    """What groups of --vllm-config override goes before the flag, for the trainer, too, and for the rules of flags."""
    folder, config = folder_of(phi3(), tmp_path / "hf"), tmp_path / "engines.yaml"
    words = f"--hf-checkpoint {folder} --prompt-data {folder}/rows.jsonl --rm-type random --num-rollout 1 --device cpu"
    words += " --actor-num-gpus-per-node 1 --rollout-batch-size 1 --train-backend hf --apply-chat-template"

    def context(first: str, second: str, *more: str) -> tuple[int | None, int | None]:
        config.write_text(GROUPS % (first, second, folder))
        args = parse([*words.split(), "--vllm-config", str(config), *more])
        cluster = LocalCluster(args, log_dir=tmp_path, scratch=tmp_path, with_engines=False)
        trainer = cluster.setup_requests["actor"][0][0]
        return args.rollout_max_prompt_len, trainer.vllm_max_model_len

    assert context("60", "0.04k", "--vllm-max-model-len", "12") == (39, 40)
    assert context("12", "auto") == (11, 12)  # auto: the model's own, which is its original length
    with pytest.raises(ConfigError, match="engines of 12 and of 40 tokens have different rotary factors"):
        context("12", "40")
    args = parse(words.split())
    assert args.rollout_max_prompt_len == ORIGINAL - 1 and context_of_model(args) == ORIGINAL


@pytest.mark.vllm
@pytest.mark.parametrize("limit", [ORIGINAL, LONGEST])
def test_the_frequencies_are_those_of_vllm(limit: int, monkeypatch: pytest.MonkeyPatch):
    from vllm.model_executor.layers.rotary_embedding import dynamic_ntk_scaling_rope, phi3_long_rope_scaled_rope

    engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=limit))
    monkeypatch.setattr(phi3_long_rope_scaled_rope, "get_current_vllm_config", lambda: engine)
    theirs = phi3_long_rope_scaled_rope.Phi3LongRoPEScaledRotaryEmbedding(
        16, 16, LONGEST, ORIGINAL, 10000.0, True, torch.float32, LONGROPE["short_factor"], LONGROPE["long_factor"]
    )
    start = ORIGINAL if theirs.use_long_rope else 0
    cache = theirs.long_short_cos_sin_cache[start : start + ORIGINAL]
    torch.testing.assert_close(rotation(policy_of(plain(phi3()), phi3(), limit), len(cache)), cache, **SAME)
    dynamic = object.__new__(dynamic_ntk_scaling_rope.DynamicNTKScalingRotaryEmbedding)
    vars(dynamic).update(base=10000.0, scaling_factor=4.0, rotary_dim=16, head_size=16)
    vars(dynamic).update(max_position_embeddings=ORIGINAL, max_trained_positions=ORIGINAL)
    cache = dynamic._compute_cos_sin_cache()
    torch.testing.assert_close(rotation(policy_of(plain(llama()), llama(), None), len(cache)), cache, **SAME)


SAME = dict(rtol=1e-6, atol=1e-6)


def rotation(policy: Policy, num_positions: int) -> torch.Tensor:
    """`[num_positions, cos and sin]`, as vLLM caches them."""
    cos, sin = policy.model.base_model.rotary_emb(torch.zeros(1), torch.arange(num_positions)[None])
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1)
