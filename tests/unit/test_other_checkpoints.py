"""Checkpoints of another model and missing shards: one error each, with the name of what does not fit.

Megatron's own are in `test_convert.py`, layouts that do not divide in `test_arguments_rules.py` and
`test_models_map.py`, roles in `test_roles.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from instep.arguments.parse import parse
from instep.checkpoints.hf_export import check_hf_checkpoint
from instep.checkpoints.megatron import Part
from instep.checkpoints.megatron_files import Chunk, Stored
from instep.checkpoints.weight_files import INDEX, weight_files
from instep.engines.embedded.model import load_model
from instep.engines.embedded.weights import LiveWeights
from instep.errors import CheckpointError, ConfigError
from instep.training.worker import Worker
from tests.assets import make_checkpoint, make_prompts, with_head

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer layers": ({"layers": 1}, "11 of its weights do not belong to the model; the first is 'model.layers.1."),
    "more layers": ({"layers": 3}, "Missing key in checkpoint state_dict: model.model.layers.2."),
    "wider": ({"head_dim": 32}, "Size mismatch between saved torch.Size([64, 64]) and current: torch.Size([128, 64])"),
    "an output layer": ({"tied": False}, "Missing key in checkpoint state_dict: model.lm_head.weight"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    make_prompts(folder / "train.jsonl", 2)
    one = worker(folder, "hf", folder)
    (folder / "iter_0000000").mkdir()
    one.backend.save(folder / "iter_0000000")
    dist.destroy_process_group()
    return folder


def worker(folder: Path, model: str, place: Path, head: int = 0, **shape: Any) -> Worker:
    """A worker of a checkpoint; with `head` in it, beside its tied embedding, its output layer, so many times that."""
    make_checkpoint(place / model, **shape)
    if head:
        made = AutoModelForCausalLM.from_pretrained(place / model)
        made.lm_head.weight.data *= head
        with_head(place / model, made)
    words = (
        f"--hf-checkpoint {place / model} --prompt-data {folder}/train.jsonl --rollout-batch-size 1 --rm-type random "
    )
    words += "--n-samples-per-prompt 4 --num-rollout 1 --actor-num-gpus-per-node 1 --device cpu --train-backend hf"
    made = Worker(lambda event: None)
    made.setup(parse(words.split()), 0, 1, str(place / "rendezvous"), 1)
    made.load_weights(place / model)
    return made


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_model_is_refused(saved: Path, tmp_path: Path, alone: None, other: str) -> None:
    shape, what = OTHERS[other]
    reader = worker(saved, "hf", tmp_path, **shape)
    with pytest.raises(CheckpointError) as error:
        reader.backend.load(saved / "iter_0000000")
    assert what in error.value.what and error.value.where == str(saved / "iter_0000000") and error.value.remedy
    with pytest.raises(CheckpointError, match="config.json"):
        reader.load_weights(saved / "hf")


def test_a_critic_begins_with_an_actor_that_has_an_output_layer(saved: Path, tmp_path: Path, alone: None) -> None:
    """Its own is a fresh one, so that the actor's is no weight too many."""
    actor = worker(saved, "hf", tmp_path, tied=False)
    (tmp_path / "actor").mkdir()
    actor.backend.save(tmp_path / "actor")
    actor.backend.load(tmp_path / "actor", optimizer=False, fresh_head=True)
    weights = {spec.name: tensor for spec, tensor in actor.backend.weight_source() if tensor is not None}
    assert not weights["lm_head.weight"].any() and weights["model.norm.weight"].any()


@pytest.mark.parametrize("scale", [1, 2])
def test_an_output_layer_beside_tied_embeddings_is_trained_if_it_is_another(
    saved: Path, tmp_path: Path, alone: None, scale: int
) -> None:
    made = worker(saved, "hf", tmp_path, head=scale)
    assert {spec.name for spec, _ in made.backend.weight_source()} == LiveWeights(
        load_model(str(tmp_path / "hf"), torch.float32, torch.device("cpu"), 128, False), tmp_path / "hf"
    ).expected.keys()
    weights = {spec.name: tensor for spec, tensor in made.backend.weight_source()}
    assert ("lm_head.weight" in weights) == (scale == 2)
    if scale == 2:
        assert torch.equal(weights["lm_head.weight"], 2 * weights["model.embed_tokens.weight"])


def test_a_missing_shard_is_named_before_anything_loads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    files = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ConfigError, match="weights are missing: model-00002-of-00002") as error:
        check_hf_checkpoint(tmp_path)
    assert error.value.where == str(tmp_path) and error.value.remedy


INDICES = {
    "[]": "it has no weight_map",
    "{}": "it has no weight_map",
    '{"weight_map": ["model.safetensors"]}': "it has no weight_map",
    '{"weight_map": {"lm_head.weight": 1}}': "with the name of a file for each tensor",
    '{"weight_map": {"lm_head.weight": "model.saf': "is not JSON: Unterminated string",
    "[" * 5000: "nested more than 100 levels deep",
    "\xff": "can't decode byte",
}


@pytest.mark.parametrize("text", INDICES, ids=list(INDICES.values()))
def test_an_index_of_another_shape_is_one_error(tmp_path: Path, text: str) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / INDEX).write_bytes(text.encode("latin-1"))
    for read, kind in ((check_hf_checkpoint, ConfigError), (weight_files, CheckpointError)):
        with pytest.raises(kind) as error:
            read(tmp_path)
        assert f"{INDEX} cannot be read: " in error.value.what and INDICES[text] in error.value.what
        assert error.value.where == str(tmp_path / INDEX) and error.value.remedy


def test_an_expert_is_read_without_a_look_at_the_chunks_of_the_others():
    whole = torch.arange(6 * 4 * 2.0).view(6, 4, 2)  # pairs of experts, in halves
    boxes = [(slice(e, e + 2), slice(r, r + 2)) for e in (0, 2, 4) for r in (0, 2)]
    chunks = tuple(Chunk((e.start, r.start, 0), (2, 2, 2), whole[e, r].clone) for e, r in boxes)
    stored = Stored(whole.dtype, tuple(whole.shape), chunks)
    for expert in range(6):
        assert torch.equal(Part("", stored, (expert,)).read((1, 0), (3, 2)), whole[expert, 1:])
        assert [chunk.offsets[:1] for chunk in stored.at((expert,))] == [(expert - expert % 2,)] * 2
    assert stored.at(()) == list(chunks) and not stored.at((6,))
