"""Make the checkpoints of `tests/distributed/data` by the `megatron.training` of Megatron-LM core_v0.16.1, a checkout:

    PYTHONPATH=MEGATRON_LM:. python -m tests.distributed.megatron_training tests/distributed/data

Its own arguments, models, optimizer and `save_checkpoint`, in two processes over gloo (Triton and six must be there,
because it imports them). Beside each lie the weights that it stands for (`weights.safetensors`), and all gradients of
its one step were `GRADIENT`, which says what the moments are.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from transformers import Qwen3Config

from tests.distributed.megatron_layouts import random_model

CONFIG = Qwen3Config(
    vocab_size=44, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False,
)  # fmt: skip
GRADIENT, BETAS, ITERATION = 0.5, (0.9, 0.95), 7
WORDS = f"""
--num-layers 2 --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 8 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --qk-layernorm
--disable-bias-linear --vocab-size 44 --position-embedding-type rope --rotary-base 10000 --seq-length 64
--no-rope-fusion --max-position-embeddings 64 --untie-embeddings-and-output-weights --transformer-impl local
--micro-batch-size 1 --global-batch-size 2 --lr 1e-2 --train-iters 10 --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]}
--clip-grad 0 --save-interval 7 --attention-dropout 0 --hidden-dropout 0 --no-persist-layer-norm
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --distributed-backend gloo --use-cpu-initialization
"""
CHECKPOINTS = {  # name: flags of Megatron
    "torch_dist": "--ckpt-format torch_dist --tensor-model-parallel-size 2",
    "torch": "--ckpt-format torch --pipeline-model-parallel-size 2",
}


def write(rank: int, name: str, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    from instep.training.megatron import cpu_platform

    cpu_platform.install()
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=10)  # type: ignore[assignment]  # which it asks
    torch.cuda.get_device_capability = lambda *_: (10, 0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}.rendezvous", rank=rank, world_size=2)
    os.chdir(folder)  # a checkpoint holds the arguments that it was made with
    sys.argv = ["pretrain_gpt.py", *WORDS.split(), *CHECKPOINTS[name].split(), "--save", name]
    with cpu_platform.scope():
        model, optimizer, scheduler = make()
    backend = instep_backend(Path(folder), name)
    backend.load_hf(Path(folder) / "hf")
    weights = {key: value for key, value in backend.chunks[0].state_dict().items() if "_extra_state" not in key}
    model[0].module.load_state_dict(weights)
    with cpu_platform.scope():
        optimizer.reload_model_params()
        for p in model[0].parameters():
            p.main_grad.fill_(GRADIENT)
        assert optimizer.step()[0]
        from megatron.training.checkpointing import save_checkpoint

        save_checkpoint(ITERATION, model, optimizer, scheduler, 0)
    backend.chunks[0].load_state_dict(model[0].module.state_dict(), strict=False)  # instep's attention has a state
    from tests.distributed.megatron_runs import export

    weights = export(backend)
    if rank == 0:
        save_file(weights, f"{folder}/{name}/weights.safetensors")


def make() -> tuple[Any, Any, Any]:
    from gpt_builders import gpt_builder
    from megatron.core import parallel_state
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.training import training
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables
    from megatron.training.tokenizer.tokenizer import _vocab_size_with_padding

    args = validate_args(parse_args())
    args.padded_vocab_size = _vocab_size_with_padding(args.vocab_size, args)
    set_global_variables(args, build_tokenizer=False)
    parallel_state.initialize_model_parallel(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    model_parallel_cuda_manual_seed(1)
    model = training.get_model(lambda **places: gpt_builder(args, **places))
    config, _ = training.get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(config, model)
    return model, optimizer, training.get_optimizer_param_scheduler(optimizer)


def instep_backend(folder: Path, name: str) -> Any:
    from instep.training.megatron.backend import MegatronBackend
    from tests.distributed.megatron_runs import make_args

    sizes = {"tensor_model_parallel_size": 2} if name == "torch_dist" else {"pipeline_model_parallel_size": 2}
    more: dict[str, Any] = dict(device=torch.device("cpu"), dtype=torch.float32, with_optimizer=False)
    return MegatronBackend(make_args(**sizes), hf_config=CONFIG, **more)


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        random_model(CONFIG).save_pretrained(f"{folder}/hf")
        for name in CHECKPOINTS:
            mp.spawn(write, (name, folder), nprocs=2)
            shutil.copytree(f"{folder}/{name}", target / name, dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
