"""A model that Megatron does not know is one error before anything loads, and what its remedy says trains it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from instep.arguments.parse import parse
from instep.errors import ConfigError
from instep.preflight.inputs import check_inputs
from instep.training.worker import Worker
from instep.types import TokenBatch
from tests.architectures import tiny_config
from tests.assets import make_prompts, make_tokenizer

NAMES = {  # by model_type
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# What a Megatron script of such a model may have, beside sizes of the model.
MEGATRON = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --use-distributed-optimizer"
)


def make_model(model_type: str, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).save_pretrained(folder / "hf")
    make_tokenizer().save_pretrained(folder / "hf")
    make_prompts(folder / "train.jsonl", 2)
    return folder / "hf"


def command_line(hf: Path, folder: Path) -> list[str]:
    words = f"--hf-checkpoint {hf} --prompt-data {folder}/train.jsonl --rollout-batch-size 1 --rm-type random "
    words += "--input-key prompt --n-samples-per-prompt 4 --num-rollout 1 --device cpu --precision fp32 "
    words += f"--run-dir {folder}/run"
    return words.split()


def check_training(words: list[str], folder: Path) -> None:
    """A step on the checkpoint of the command line makes good tokens likelier."""
    args = parse([*words, "--actor-num-gpus-per-node", "1"])
    worker = Worker(lambda event: None)
    worker.setup(args.replace(device="cpu", precision="fp32"), 0, 1, str(folder / "rendezvous"), 1)
    worker.load_weights(Path(args.hf_checkpoint))
    worker.remark()
    ones = torch.ones(8)
    columns = {"loss_mask": ones, "loss_weights": ones / 8, "advantages": torch.linspace(-1, 1, 8)}
    tokens = torch.randint(4, 40, (18,), generator=torch.Generator().manual_seed(1))
    batch = TokenBatch(tokens, torch.tensor([10, 8]), torch.tensor([5, 3]), columns, {"temperature": torch.ones(2)})
    before = worker.log_probs(batch, [[0, 1]], ["log_probs"])
    trained = worker.train(batch, [[[0, 1]]], [1e-2])
    after = worker.log_probs(batch, [[0, 1]], ["log_probs"])
    assert before is not None and trained is not None and after is not None
    assert trained[0][0]["grad_norm"] > 0 and not trained[0][0]["skipped_steps"]
    gain = ((after["log_probs"] - before["log_probs"]) * columns["advantages"]).sum()
    assert gain > 0


@pytest.mark.parametrize("model_type", NAMES)
def test_the_error_names_the_architecture_and_its_remedy_trains(model_type: str, tmp_path: Path, alone: None) -> None:
    hf = make_model(model_type, tmp_path)
    words = command_line(hf, tmp_path)
    with pytest.raises(ConfigError) as error:
        parse([*words, "--actor-num-gpus-per-node", "4", *MEGATRON.split()])
    said = str(error.value)
    assert f"no model map for {NAMES[model_type]} (model_type {model_type!r})" in said and said.count("where:") == 1
    assert "--hf-checkpoint" in error.value.where
    remedy = re.match("(--train-backend hf) without ([^;]+);", error.value.remedy)
    assert remedy is not None, error.value.remedy
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match="convert the quantized weights to bfloat16, and give --train-backend hf;"):
        parse([*words, "--actor-num-gpus-per-node", "1"])
    (hf / "config.json").write_text(json.dumps(config))
    left = MEGATRON.split()
    for flag in remedy[2].split(", "):
        at = left.index(flag)
        del left[at : at + (2 if left[at + 1 : at + 2] and left[at + 1].isdecimal() else 1)]
    check_training([*words, *remedy[1].split(), *left], tmp_path)


def test_a_model_that_hf_does_not_train_either_is_refused_for_that(tmp_path: Path) -> None:
    """A model with a vision tower: one error, which does not send the user to the other backend."""
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": {"model_type": "gemma3_text"}}))
    (tmp_path / "model.safetensors").write_bytes(b"0")
    make_prompts(tmp_path / "train.jsonl", 2)
    words = f"--hf-checkpoint {tmp_path} --prompt-data {tmp_path}/train.jsonl --rollout-batch-size 1 --rm-type random "
    words += f"--actor-num-gpus-per-node 1 --num-rollout 1 --input-key prompt --run-dir {tmp_path}/run"
    for backend in ("megatron", "hf"):
        with pytest.raises(ConfigError, match="not a causal language model .Gemma3ForConditionalGeneration"):
            check_inputs(parse([*words.split(), "--train-backend", backend]))
