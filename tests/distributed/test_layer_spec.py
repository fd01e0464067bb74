"""--spec: the layers that a function of the user's describes are those of the model, with instep's numbers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from instep.errors import InstepError
from instep.training.megatron.hooks import MegatronHooks
from tests.distributed.megatron_layouts import BIAS_RATES, LAYOUTS, MODELS, random_model
from tests.distributed.megatron_oracle import oracle_outputs
from tests.distributed.megatron_runs import export, make_args, micro_batches, train

MEGATRON = True  # what the ranks have imported
ME = __name__


def plain(args, config, vp_stage):
    """Megatron's own layers, as slime's functions begin with them."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)


def one_for_all(args, config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm)


def experts_of_ones_own(args, config, vp_stage):
    from megatron.core.tensor_parallel import ColumnParallelLinear

    class Column(ColumnParallelLinear):
        pass

    block = plain(args, config, vp_stage)
    for layer in block.layer_specs:
        if experts := getattr(layer.submodules.mlp.submodules, "experts", None):
            experts.submodules.linear_fc1 = Column
    return block


def too_many(args, config, vp_stage):
    block = plain(args, config, vp_stage)
    block.layer_specs.append(block.layer_specs[0])
    return block


def a_provider(args, config, vp_stage):
    return lambda pre_process, post_process: None


def with_transformer_engine(args, config, vp_stage):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def more_weights(args, config, vp_stage):
    block = plain(args, config, vp_stage)
    attention = block.layer_specs[0].submodules.self_attention

    class Gated(attention.module):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.gate = torch.nn.Parameter(torch.ones(4))
            del self.k_layernorm
            self.k_layernorm = torch.nn.Identity()

    attention.module = Gated
    return block


def built(root: Path, layout: str, path: str | None, *, fresh: bool = True):
    from instep.training.megatron import cpu_platform

    cpu_platform.install()
    from megatron.core import parallel_state

    from instep.training.megatron.backend import MegatronBackend

    if fresh:
        parallel_state.destroy_model_parallel()
    _, model, changes = LAYOUTS[layout]
    args = make_args(**changes, qk_layernorm=True, moe_router_bias_update_rate=BIAS_RATES.get(model, 0.0))
    hooks = MegatronHooks(args, None, None, None, None, path)
    options = dict(hf_config=AutoConfig.from_pretrained(root / model), device=torch.device("cpu"), dtype=torch.float32)
    backend = MegatronBackend(args, **options, hooks=hooks)
    backend.load_hf(root / model)
    return backend


def results(root: Path, layout: str, path: str | None) -> tuple:
    backend = built(root, layout, path)
    p, per_rank = backend.parallel, 4 // backend.parallel.dp_size
    batches = micro_batches(0)[p.dp_rank * per_rank : (p.dp_rank + 1) * per_rank]
    scores = backend.forward_only(batches) or []
    parts = {type(module).__name__ for chunk in backend.chunks for module in chunk.modules()}
    keys = sorted(key for chunk in backend.chunks for key in chunk.sharded_state_dict())
    return [s.log_probs for s in scores], export(backend), train(backend, range(1)), export(backend), parts, keys


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("untied", "tied", "deep", "moe-mixed", "deepseek"):
        random_model(MODELS[name]).save_pretrained(root / name)
    return root


@pytest.mark.parametrize(
    "layout, path",
    [
        pytest.param("one", f"{ME}.plain", marks=pytest.mark.slow),
        ("one", f"{ME}.one_for_all"),
        ("tp2-sp-tied", f"{ME}.plain"),
        ("pp2-virtual", f"{ME}.plain"),
        ("one-moe-grouped", f"{ME}.plain"),
        ("one-deepseek", f"{ME}.plain"),
    ],
)
def test_megatrons_plain_layers_become_those_of_a_run_without_the_flag(run_ranks, root, layout, path):
    """Numbers, weights and keys of checkpoints are those without the flag: instep's parts stand in for plain ones."""
    ranks = LAYOUTS[layout][0]
    for mine, want in zip(*(run_ranks(results, ranks, root, layout, p) for p in (path, None)), strict=True):
        assert len(mine[0]) == len(want[0]) and all(map(torch.equal, mine[0], want[0]))
        for got, expected in ((mine[1], want[1]), (mine[3], want[3])):
            assert got.keys() == expected.keys() and all(torch.equal(got[k], expected[k]) for k in got)
        assert mine[2] == want[2] and mine[4:] == want[4:]


def test_a_part_of_the_users_is_in_the_model(run_ranks, root):
    """The example of docs/hooks.md, against transformers with the same bound."""
    (got,) = run_ranks(results, 1, root, "one", "examples.hooks.layer_spec")
    model = AutoModelForCausalLM.from_pretrained(root / "untied", attn_implementation="eager", dtype=torch.float32)
    batches = micro_batches(0)
    with torch.no_grad():
        unbounded = [oracle_outputs(model, batch).log_probs for batch in batches]
        for layer in model.model.layers:
            layer.self_attn.v_proj.register_forward_hook(lambda module, inputs, out: out.clamp(-0.1, 0.1))
        wanted = [oracle_outputs(model, batch).log_probs for batch in batches]
    assert "BoundedAttention" in got[4] and "PackedCoreAttention" in got[4] and "SelfAttention" not in got[4]
    for scores, want, other in zip(got[0], wanted, unbounded, strict=True):
        torch.testing.assert_close(scores, want, atol=1e-5, rtol=1e-5)
        assert (scores - other).abs().max() > 1e-3


def test_a_part_of_plain_experts_is_the_users(run_ranks, root):
    (got,), (want,) = (
        run_ranks(results, 1, root, "one-moe-mixed", path) for path in (f"{ME}.experts_of_ones_own", None)
    )
    assert all(map(torch.equal, got[0], want[0])) and got[2] == want[2]
    assert got[4] - want[4] == {"Column"} and "SequentialMLP" in got[4]


def refusals(root: Path, paths: list[str]) -> list[InstepError]:
    return [refused(root, path) for path in paths]


def refused(root: Path, path: str) -> InstepError:
    try:
        built(root, "one", path)
    except InstepError as error:
        return error
    raise AssertionError(f"{path} was taken")


def test_what_is_no_spec_of_this_model(run_ranks, root):
    names = ("too_many", "a_provider", "with_transformer_engine", "more_weights", "nothing", "no_module.f")
    paths = {name: name if "." in name else f"{ME}.{name}" for name in names}
    errors = dict(zip(names, run_ranks(refusals, 1, root, list(paths.values()))[0], strict=True))
    for name, path in paths.items():
        assert path in str(errors[name]) and errors[name].remedy, errors[name]
    for name in ("too_many", "a_provider"):
        assert f"{paths[name]} returned" in errors[name].what and "test_layer_spec.py:" in errors[name].where
        assert "TransformerBlockSubmodules" in errors[name].remedy
    assert "raised" in errors["with_transformer_engine"].what
    assert "layers.0.self_attention.gate is not a parameter of this model" in errors["more_weights"].what
    assert "layers.1.self_attention.k_layernorm.weight is missing" in errors["more_weights"].what
    assert f"module {ME!r} has no 'nothing'" in errors["nothing"].what
    assert "module 'no_module' not found" in errors["no_module.f"].what
