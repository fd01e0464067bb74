"""TRL's own `GRPOTrainer` on the quickstart's task, in the environment of a TRL (`.venv-trl-1.10`, `.venv-trl-1.16`).

    python trl_train.py --model DIR --data train.jsonl --steps 25 --seed 0 --out FILE [--server URL --group-port PORT]

With `--cuda` it trains on the first GPU, from which TRL sends its weights by NCCL. Without `--server` transformers
generates in this process; with it the server does, and its weights are updated at each step: `use_vllm=True,
vllm_mode="server"`. For that `stub_vllm` must be first on the PYTHONPATH. FILE gets one JSON object: the versions, and
of each step the mean reward, the gradient's norm and the seconds. Nothing of instep is imported here, and TRL is as its
wheel has it.
"""

from __future__ import annotations

import json
import tempfile
import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from quickstart_task import boxed, fields_of, parser_of, rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MORE: dict[str, Any] = {  # a CPU, and nothing besides the training
    "bf16": False,
    "dataloader_pin_memory": False,
    "logging_steps": 1,
    "disable_tqdm": True,
}


class Steps(TrainerCallback):
    """What TRL logs of each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.mark = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            now = time.monotonic()
            names = ("reward", "grad_norm", "sampling/sampling_logp_difference/mean", "completions/mean_length")
            self.rows.append({n: float(logs[n]) for n in names if n in logs} | {"seconds": now - self.mark})
            self.mark = now
            print(self.rows[-1], flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--server", help="http://HOST:PORT")
    parser.add_argument("--group-port", type=int, default=51216)
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args()
    config = dict(MORE)
    if args.server:
        if not args.cuda:
            import cpu_as_cuda  # noqa: F401

        config |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": args.server}
        config["vllm_group_port"] = args.group_port
    config |= {"use_cpu": False} if args.cuda else {}
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=boxed,
            train_dataset=Dataset.from_list(rows_of(args)),
            args=GRPOConfig(**fields_of(args, folder) | config),
            callbacks=[steps],
        )
        trainer.train()
    versions = {module.__name__: module.__version__ for module in (trl, torch, transformers)}
    args.out.write_text(json.dumps({"versions": versions, "steps": steps.rows}) + "\n")


if __name__ == "__main__":
    main()
