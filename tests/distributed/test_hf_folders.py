"""Hugging Face folders of the `hf` backend: exports that load bit for bit, and folders that it refuses."""

import json
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from instep.checkpoints.hf_export import check_hf_checkpoint, export_hf
from instep.errors import CheckpointError, ConfigError
from instep.training.hf.backend import HfBackend
from tests.distributed.hf_runs import ARGS, make_backend, make_batch, oracle_log_probs, train, weights_of


def _export_rank(path, dst, shard_bytes):
    from instep.checkpoints import hf_export

    backend = make_backend(path)
    train(backend, range(1))
    hf_export.MAX_SHARD_BYTES, before = shard_bytes, hf_export.MAX_SHARD_BYTES
    export_hf(backend.weight_source(), path, dst)
    hf_export.MAX_SHARD_BYTES = before
    dist.barrier()
    again = make_backend(path, load=False)
    again.load_hf(dst)
    return weights_of(backend), weights_of(again), backend.forward_only([make_batch(0)])[0].log_probs


@pytest.mark.parametrize("world_size, shard_bytes", [(1, 5 * 10**9), (2, 20_000)])
def test_an_export_loads_into_plain_transformers_bit_for_bit(run_ranks, checkpoint, tmp_path, world_size, shard_bytes):
    dst = tmp_path / "export"
    live, loaded, log_probs = run_ranks(_export_rank, world_size, checkpoint, dst, shard_bytes)[0]
    original = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    model = AutoModelForCausalLM.from_pretrained(dst)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, live[name]) and torch.equal(loaded[name], live[name])
        assert not torch.equal(tensor, original[name]), "the step was to move it"
    with torch.no_grad():
        torch.testing.assert_close(
            torch.cat(oracle_log_probs(model, make_batch(0))[0]), log_probs, rtol=1e-5, atol=1e-5
        )
    assert (dst / "chat_template.jinja").read_text() == "{{ messages }}" and (dst / "tokenizer_config.json").exists()
    assert len(list(dst.glob("*.safetensors"))) == (1 if shard_bytes > 10**6 else len(set(read_index(dst).values())))
    assert check_hf_checkpoint(dst)["model_type"] == "qwen3"
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def read_index(folder: Path) -> dict[str, str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    return index


def test_a_full_disk_leaves_the_last_export_and_no_litter(tied_checkpoint, tmp_path):
    weights = AutoModelForCausalLM.from_pretrained(tied_checkpoint).state_dict()
    specs = [SimpleNamespace(name=n, shape=tuple(w.shape), dtype=w.dtype, nbytes=w.nbytes) for n, w in weights.items()]

    class Source(list):
        emits = True

    source = Source((spec, weights[spec.name]) for spec in specs[:-1])
    source.specs = specs[:-1]
    export_hf(source, tied_checkpoint, tmp_path / "hf")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # every file over 10 kB fails to grow
    try:
        with pytest.raises(CheckpointError, match="cannot write"):
            export_hf(source, tied_checkpoint, tmp_path / "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    (tmp_path / "hf" / "mine.txt").write_text("mine")  # what instep has not written, no export removes
    export_hf(source, tied_checkpoint, tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "hf.old-1"]
    assert (tmp_path / "hf.old-1" / "mine.txt").read_text() == "mine"
    export_hf(source, tied_checkpoint, tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "hf.old-1"]


@pytest.mark.parametrize(
    "config, message",
    [
        (None, "config.json is missing"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "not a causal language model"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
            "encoder-dec",
        ),
        ({"architectures": ["Qwen3Model"], "model_type": "qwen3"}, "not a causal language model"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, "weights are missing: model.safetensors"),
    ],
)
def test_folders_that_are_no_causal_lm_checkpoint(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        check_hf_checkpoint(tmp_path)


def test_a_checkpoint_of_another_shape_is_refused(run_ranks, tied_checkpoint, tmp_path):
    message = run_ranks(_wrong_shape_rank, 1, tied_checkpoint)[0]
    assert "model.embed_tokens.weight" in message and "[61, 32]" in message and "[62, 32]" in message


def _wrong_shape_rank(path):
    config = AutoConfig.from_pretrained(path)
    config.vocab_size = 62
    backend = HfBackend(ARGS, hf_config=config, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(CheckpointError) as error:
        backend.load_hf(path)
    return str(error.value)
