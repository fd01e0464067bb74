"""A published folder with layers for images: its language model is trained, and the folder comes back whole."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from instep.arguments.parse import parse
from instep.checkpoints.folder_names import FolderNames, plain_names
from instep.checkpoints.hf_export import copy_companions
from instep.checkpoints.hf_weights import opened_weights
from instep.checkpoints.remote_code import load_config
from instep.cli import main
from instep.cluster.engine_plan import plan_engines
from instep.engines.embedded.weights import LiveWeights
from instep.models.config_file import read_config
from instep.models.sizes import shape_in, shape_of
from instep.preflight.inputs import check_inputs
from instep.training.worker import Worker
from instep.types import TokenBatch
from instep.weights.spec import TensorSpec
from tests.architectures import tiny_config
from tests.assets import make_prompts
from tests.command_line import argv, make_folder, refusal
from tests.families import make_published
from tests.published import config as published_config

TOKENS = torch.arange(4, 24)[None]
WORDS = (
    "--rollout-batch-size 1 --rm-type random --input-key prompt --n-samples-per-prompt 4 --num-rollout 1 "
    "--actor-num-gpus-per-node 1 --device cpu --precision fp32 --rollout-backend embedded"
)


def make_tiny(model_type: str, folder: Path, *, stacked: bool = False) -> Path:
    config = tiny_config(f"{model_type}_text").to_dict() | {"layer_types": ["linear_attention", "full_attention"]}
    config["tie_word_embeddings"] = model_type == "qwen3_5"  # as the small ones are
    return make_published(CONFIG_MAPPING[f"{model_type}_text"](**config), folder, stacked=stacked)


def files(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def logits(kind: type, folder: Path) -> Tensor:
    with torch.no_grad():
        return kind.from_pretrained(folder).eval()(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.parametrize("backend", ["hf", "megatron"])
@pytest.mark.parametrize(("model_type", "stacked"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)])
def test_a_published_folder_is_trained_and_comes_back_whole(
    model_type: str, stacked: bool, backend: str, tmp_path: Path, alone: None
) -> None:
    hf = make_tiny(model_type, tmp_path / "hf", stacked=stacked)
    make_prompts(tmp_path / "train.jsonl", 2)
    words = f"--hf-checkpoint {hf} --prompt-data {tmp_path}/train.jsonl --run-dir {tmp_path}/run {WORDS}"
    args = parse([*words.split(), "--train-backend", backend])
    check_inputs(args)
    worker = Worker(lambda event: None)
    worker.setup(args, 0, 1, str(tmp_path / "rendezvous"), 1)
    worker.load_weights(hf)
    assert ("lm_head.weight" in files(hf)) is (model_type == "qwen3_5_moe")
    images = {name for name in files(hf) if name.startswith("model.visual.")}
    assert f"{len(images)} tensors of layers for images ({min(images)}, ...) are not trained" in worker.remark()

    worker.export_hf(tmp_path / "same")  # bit-equal both ways, images too
    assert files(tmp_path / "same").keys() == files(hf).keys()
    assert all(torch.equal(tensor, files(hf)[name]) for name, tensor in files(tmp_path / "same").items())
    engine = LiveWeights(AutoModelForCausalLM.from_pretrained(hf).requires_grad_(False), hf)
    assert set(engine.expected) == {spec.name for spec in worker.backend.weight_source().specs}

    ones = torch.ones(8)
    columns = {"loss_mask": ones, "loss_weights": ones / 8, "advantages": torch.linspace(-1, 1, 8)}
    batch = TokenBatch(
        TOKENS[0, :18], torch.tensor([10, 8]), torch.tensor([5, 3]), columns, {"temperature": torch.ones(2)}
    )
    before = worker.log_probs(batch, [[0, 1]], ["log_probs"])
    trained = worker.train(batch, [[[0, 1]]], [1e-2])
    after = worker.log_probs(batch, [[0, 1]], ["log_probs"])
    assert before and after and trained and trained[0][0]["grad_norm"] > 0
    assert ((after["log_probs"] - before["log_probs"]) * columns["advantages"]).sum() > 0

    worker.export_hf(tmp_path / "out")
    out = files(tmp_path / "out")
    assert all(torch.equal(out[name], files(hf)[name]) for name in images)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((hf / "config.json").read_text())
    whole, text = (logits(kind, tmp_path / "out") for kind in (AutoModelForImageTextToText, AutoModelForCausalLM))
    torch.testing.assert_close(whole, text, rtol=0, atol=1e-6)
    scores = text[0, :9].log_softmax(-1).gather(1, TOKENS[0, 1:10, None])[-5:, 0]
    torch.testing.assert_close(after["log_probs"][:5], scores, rtol=0, atol=1e-5)
    engine.load({spec.name: tensor for spec, tensor in worker.backend.weight_source()}, exact=True)
    digests = engine.digests()
    engine.load(out, exact=False)
    assert engine.digests() == digests
    if backend == "megatron":
        from megatron.core import parallel_state  # only now: on a CPU it needs stand-ins

        parallel_state.destroy_model_parallel()


def test_a_run_is_planned_for_the_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, monkeypatch)
    text = published_config("qwen3.5-35B-A3B")
    kind = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    Path("model/config.json").write_text(json.dumps({**kind, "text_config": text, "vision_config": {"depth": 27}}))
    assert shape_of(str(tmp_path / "model")) == shape_in(text)
    args = parse(argv("--train-backend megatron --rollout-backend vllm --num-experts 256"), "plan")
    assert "--language-model-only" in plan_engines(args)[0].flags
    said = refusal("--train-backend hf --rollout-backend vllm --lora-rank 4 --weight-sync lora")
    assert "an adapter names the layers of the language model alone" in said


@pytest.mark.parametrize("stacked", [False, True])
def test_a_published_folder_is_converted_to_megatron_and_back(stacked: bool, tmp_path: Path) -> None:
    hf = make_tiny("qwen3_5_moe", tmp_path / "hf", stacked=stacked)
    at = ["--hf-checkpoint", str(hf)]
    assert main(["convert", "hf-to-megatron", *at, "--save", str(tmp_path / "megatron")]) == 0
    assert (
        main(["convert", "megatron-to-hf", *at, "--load", str(tmp_path / "megatron"), "--save", str(tmp_path / "hf2")])
        == 0
    )
    assert files(tmp_path / "hf2").keys() == files(hf).keys()
    assert all(torch.equal(tensor, files(hf)[name]) for name, tensor in files(tmp_path / "hf2").items())


@pytest.mark.parametrize("stacked", [("model", "mtp"), ("model",)], ids=["qwen3.6", "qwen3.5"])
def test_experts_are_in_the_tensors_of_the_folder_both_ways(stacked: tuple[str, ...], tmp_path: Path) -> None:
    """Those of multi-token prediction come last, in one tensor or one by one."""
    tensors = {"model.language_model.norm.weight": torch.ones(5)}
    for layer in ("model.language_model.layers.0", "mtp.layers.0"):
        experts = f"{layer}.mlp.experts"
        if layer.partition(".")[0] in stacked:
            tensors[f"{experts}.gate_up_proj"] = torch.randn(4, 6, 5)
            tensors[f"{experts}.down_proj"] = torch.randn(4, 5, 3)
        else:
            for i, (name, shape) in product(range(4), (("gate", (3, 5)), ("up", (3, 5)), ("down", (5, 3)))):
                tensors[f"{experts}.{i}.{name}_proj.weight"] = torch.randn(shape)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    names = FolderNames.of(tmp_path)
    parts = [f"experts.{i}.{name}_proj.weight" for i in range(4) for name in ("gate", "up", "down")]
    order = [f"model.layers.0.mlp.{part}" for part in parts] + ["model.norm.weight"]
    order += [f"mtp.layers.0.mlp.{part}" for part in parts]
    with opened_weights(tmp_path, torch.float32) as stored:
        plain = plain_names(stored)
        assert set(plain) == set(order)
        specs = [TensorSpec(name, tuple(plain[name].shape), torch.float32) for name in order]
        found = list(names.tensors([(spec, plain[spec.name].read()) for spec in specs]))
    assert {spec.name: spec.shape for spec, _ in found} == {name: tuple(t.shape) for name, t in tensors.items()}
    assert all(tensor is not None and torch.equal(tensor, tensors[spec.name]) for spec, tensor in found)
    assert names.specs(specs) == [spec for spec, _ in found]


def test_an_export_without_multi_token_prediction_says_so_in_the_text_config(tmp_path: Path) -> None:
    hf, to = make_tiny("qwen3_5", tmp_path / "hf"), tmp_path / "to"
    config = json.loads((hf / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (hf / "config.json").write_text(json.dumps(config))
    to.mkdir()
    copy_companions(hf, to, [TensorSpec("model.language_model.norm.weight", (5,), torch.float32)])
    assert json.loads((to / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 0


def test_embeddings_that_only_the_whole_model_calls_tied_are_tied(tmp_path: Path) -> None:
    hf = make_tiny("qwen3_5", tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text()) | {"tie_word_embeddings": True}
    del config["text_config"]["tie_word_embeddings"]
    (hf / "config.json").write_text(json.dumps(config))
    assert load_config(str(hf), False).tie_word_embeddings is True
    assert read_config(hf)["tie_word_embeddings"] is True
