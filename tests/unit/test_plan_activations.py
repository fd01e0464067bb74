"""What `instep plan` says of activations, against the bytes that autograd keeps in the models themselves.

Models lie on the device `meta`: nothing is computed, but every tensor has its size, and packed samples take the kernel
of GPUs. So these are the tensors of a GPU, in bf16, counted on a CPU.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from instep.models.checkpoint_names import decoder_layers
from instep.models.sizes import Shape, shape_in, shape_of
from instep.preflight.plan.linear import kept_by_mixers
from instep.preflight.plan.trainer import Rank, forward_work, kept, kept_in_layer
from instep.training.delta_net import gated_delta_rule
from instep.training.hf import layout
from instep.training.hf.model import Policy
from instep.training.packing import within

SIZES = {  # hidden, ffn, heads, key heads, width of a head: no two widths are equal
    "wide ffn": (512, 1792, 4, 2, 64),
    "many heads": (256, 640, 8, 4, 96),
    "0.6b": (1024, 3072, 16, 8, 128),
}
LAYERS, TOKENS, VOCAB = 3, 1024, 32000


def config_of(size, family="qwen3"):
    hidden, ffn, heads, kv_heads, head_dim = SIZES[size]
    experts = dict(num_experts=8, num_experts_per_tok=4, moe_intermediate_size=ffn // 8, norm_topk_prob=True)
    return AutoConfig.for_model(
        family, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=LAYERS, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=VOCAB, tie_word_embeddings=True,
        **experts if family == "qwen3_moe" else {},
    )  # fmt: skip


def rank(folder, config, *, precision="bf16", recompute=None, compiled=False, tokens=TOKENS, responses=0):
    config.save_pretrained(folder)
    shape = shape_of(str(folder))
    assert isinstance(shape, Shape)
    args = SimpleNamespace(
        device="cuda" if compiled else "cpu",
        precision=precision, tensor_model_parallel_size=1, sequence_parallel=False, train_backend="hf",
        no_torch_compile=not compiled, recompute_granularity=recompute, lora_rank=0, weight_sync="ipc", world_size=1,
        gpu_memory_gb=80.0,
    )  # fmt: skip
    return Rank(args, shape, tokens, tokens, responses)


def bytes_kept(policy, run):
    """The bytes of the distinct tensors that autograd keeps while `run()` goes, without the parameters."""
    held = {}

    def keep(tensor):
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    own = {p.untyped_storage()._cdata for p in policy.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(storage.nbytes() for key, storage in held.items() if key not in own)


@pytest.fixture
def like_a_gpu(monkeypatch):
    act_like_a_gpu(monkeypatch)


def act_like_a_gpu(monkeypatch):
    """Nobody looks into tensors of the device `meta`, whose attention is the GPU's."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)


def on_meta(config, recompute=None, compiled=False):
    with torch.device("meta"):
        policy = Policy(config, torch.bfloat16, recompute=recompute)
    if compiled:  # cut where the compiler cuts, without its code
        for layer in decoder_layers(policy.model):
            layer.forward = torch.compile(layer.forward, dynamic=True, backend="aot_eager_decomp_partition")
    tokens = torch.zeros(TOKENS, dtype=torch.long, device="meta")
    bounds = torch.zeros(3, dtype=torch.int32, device="meta")
    return bytes_kept(policy, lambda: layout.run_packed(policy.model, tokens, tokens, bounds, TOKENS // 2))


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("size", SIZES)
def test_activations_of_plain_layers(tmp_path, like_a_gpu, size, family):
    config = config_of(size, family)
    assert kept(rank(tmp_path, config)) == pytest.approx(on_meta(config), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("size, family", [("wide ffn", "qwen3"), ("many heads", "llama"), ("wide ffn", "qwen3_moe")])
def test_activations_of_compiled_layers(tmp_path, size, family):
    """Measured in a process of its own: the compiler gives up on layers that other tests have made it compile."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        measured = pool.submit(compiled_on_meta, size, family).result(timeout=300)
    assert kept(rank(tmp_path, config_of(size, family), compiled=True)) == pytest.approx(measured, rel=0.1)


def compiled_on_meta(size, family):
    act_like_a_gpu(pytest.MonkeyPatch())
    return on_meta(config_of(size, family), compiled=True)


@pytest.mark.parametrize("size", SIZES)
def test_activations_with_recomputed_layers(tmp_path, like_a_gpu, size):
    config = config_of(size)
    assert kept(rank(tmp_path, config, recompute="full")) == pytest.approx(on_meta(config, "full"), rel=0.1)


@pytest.mark.parametrize("heads", [(2, 4, 32, 64), (1, 3, 128, 128)])
def test_what_the_delta_rule_keeps(heads):
    keys, values, key_dim, value_dim = heads
    config = config_of("wide ffn").to_dict() | {
        "model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * LAYERS, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }  # fmt: skip
    shape = shape_in(config)
    query, key = (torch.randn(1, TOKENS, keys, key_dim, requires_grad=True) for _ in range(2))
    value = torch.randn(1, TOKENS, values, value_dim, requires_grad=True)
    decay, share = (torch.rand(1, TOKENS, values, requires_grad=True) for _ in range(2))
    bounds = torch.arange(0, TOKENS + 1, TOKENS // 4)
    seen = bytes_kept(torch.nn.Module(), lambda: gated_delta_rule(query, key, value, -decay, share, bounds))
    width = 2 * keys * key_dim + values * value_dim
    around = 4 * (3 * width + 3 * values * value_dim)  # the convolution, the gate and the norm
    assert kept_by_mixers(shape, 4, 1, 0.0, cuda=False) - around == pytest.approx(seen / TOKENS, rel=0.1)


def test_selective_recomputation_keeps_products_and_attention(tmp_path):
    """Its tensors lie in a cache of torch's own; so this counts what the products give."""
    r = rank(tmp_path, config_of("wide ffn"), recompute="selective")
    hidden, ffn, heads, kv_heads, head_dim = SIZES["wide ffn"]
    q, k = heads * head_dim, kv_heads * head_dim
    products = q + 2 * k + hidden + 2 * ffn + hidden
    assert kept_in_layer(r, "selective") == 2 * (hidden + products + q) + 4 * heads
    assert kept_in_layer(r, "full") < kept_in_layer(r, "selective") < kept_in_layer(r, None)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("size, length", [("wide ffn", 256), ("many heads", 160), ("wide ffn", 400)])
def test_a_real_micro_batch_on_this_cpu(tmp_path, size, length, recompute):
    """The whole of a forward pass in fp32: layers, scored hidden states and one chunk of logits."""
    config, num = config_of(size), 2
    config.vocab_size = 1000
    r = rank(tmp_path, config, precision="fp32", recompute=recompute, tokens=num * length, responses=num * length)
    policy = Policy(config, torch.float32, recompute=recompute)
    policy.model.init_weights()
    lengths = torch.full((num,), length)
    bounds = torch.tensor([0, length, 2 * length], dtype=torch.int32)
    tokens = torch.randint(3, 1000, (num * length,))
    every = torch.arange(num * length)

    def run():
        ones = torch.ones(num * length)
        return policy(tokens, within(lengths), bounds, length, every, tokens, ones, with_entropy=True)[0]

    seen = bytes_kept(policy, run)
    unpadded = 0 if recompute else 2 * r.shape.queries * 4 * LAYERS * num * length  # what a CPU's attention copies
    assert kept(r) + unpadded == pytest.approx(seen, rel=0.05)
    assert forward_work(r) < kept(r) or recompute == "full"
