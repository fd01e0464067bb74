"""An environment of Atropos' `BaseEnv` in the place of its GSM8K, on rows of a local file (`make_model.py`).

It needs the wheel atroposlib. Each row has `prompt`, a list of messages, and `label`, the number in the last \\boxed{}.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field


class GSM8kConfig(BaseEnvConfig):
    data_path: str = Field(default=os.environ.get("GSM8K_DATA", "data/train.jsonl"), description="rows of problems")
    max_new_tokens: int = Field(default=64, description="most tokens of a response")


class GSM8kEnv(BaseEnv):
    name = "gsm8k"
    env_config_cls = GSM8kConfig

    @classmethod
    def config_init(cls) -> tuple[GSM8kConfig, list[APIServerConfig]]:
        config = GSM8kConfig(group_size=8, total_steps=1000, steps_per_eval=0, wandb_name=cls.name)
        return config, [APIServerConfig(base_url="http://localhost:9001/v1", api_key="x", server_type="vllm")]

    async def setup(self) -> None:
        with open(self.config.data_path) as file:
            rows = [json.loads(line) for line in file]
        random.Random(0).shuffle(rows)
        self.rows = itertools.cycle(rows)

    async def get_next_item(self) -> dict[str, Any]:
        return next(self.rows)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None

    async def collect_trajectories(self, item: dict[str, Any]) -> tuple[ScoredDataGroup | None, list[Any]]:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        size, longest = self.config.group_size, self.config.max_new_tokens
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answers = await managed.chat_completion(
                messages=item["prompt"], n=size, max_tokens=longest, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        for node, choice in zip(nodes, answers.choices, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            found = re.findall(r"\\boxed\{(.*?)\}", choice.message.content)
            group["scores"].append(float(found[-1:] == [str(item["label"])]))
        return (None if len(set(group["scores"])) == 1 else group), []


if __name__ == "__main__":
    GSM8kEnv.cli()
