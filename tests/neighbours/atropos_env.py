"""An environment as users of Atropos write them: its `BaseEnv`, its command line, rows of local data.

`python atropos_env.py serve --env.data_path train.jsonl --openai.server_type vllm ...`, in Atropos' own environment.
With `vllm` tokens and log-probs are the engine's own; with `openai` the environment renders and encodes text itself.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field


class TotalsConfig(BaseEnvConfig):
    data_path: str = Field(default="train.jsonl", description="rows with prompt (messages) and label")
    max_new_tokens: int = Field(default=64, description="most tokens of a response")
    two_turns: bool = Field(default=False, description="ask whether the model is sure, and score the second answer")
    score_offset: float = Field(default=0.0, description="is added to each score")


class Totals(BaseEnv):
    name = "totals"
    env_config_cls = TotalsConfig

    @classmethod
    def config_init(cls) -> tuple[TotalsConfig, list[APIServerConfig]]:
        config = TotalsConfig(group_size=8, use_wandb=False, total_steps=-1, steps_per_eval=0, wandb_name=cls.name)
        return config, [APIServerConfig(base_url="http://localhost:9001/v1", api_key="none", server_type="vllm")]

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
        server_type = self.server.servers[0].config.server_type
        group = await (self._by_text(item) if server_type == "openai" else self._by_tokens(item))
        group["scores"] = [score + self.config.score_offset for score in group["scores"]]
        return group, []

    def _score(self, text: str, label: str) -> float:
        found = re.findall(r"\\boxed\{(.*?)\}", text)
        return float(found[-1:] == [label])

    async def _by_tokens(self, item: dict[str, Any]) -> ScoredDataGroup:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        asked = {"max_tokens": self.config.max_new_tokens, "temperature": 1.0}
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            if self.config.two_turns:
                chats = [await self._two_turns(managed, item, asked) for _ in range(self.config.group_size)]
            else:
                answers = await managed.chat_completion(messages=item["prompt"], n=self.config.group_size, **asked)
                chats = [choice.message.content for choice in answers.choices]
            nodes = managed.get_state()["nodes"]
        for node, text in zip(nodes, chats, strict=True):
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(self._score(text, item["label"]))
        return group

    async def _two_turns(self, managed: Any, item: dict[str, Any], asked: dict[str, Any]) -> str:
        messages = list(item["prompt"])
        for question in ("Are you sure?", None):
            answer = await managed.chat_completion(messages=messages, n=1, **asked)
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
        return text

    async def _by_text(self, item: dict[str, Any]) -> ScoredDataGroup:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=None)
        answers = await self.server.chat_completion(
            messages=item["prompt"],
            n=self.config.group_size,
            max_tokens=self.config.max_new_tokens,
            temperature=1.0,
        )
        prompt = self.tokenizer.apply_chat_template(item["prompt"], add_generation_prompt=True, tokenize=False)
        before = self.tokenizer.encode(prompt, add_special_tokens=False)
        for choice in answers.choices:
            text = choice.message.content + (self.tokenizer.eos_token if choice.finish_reason == "stop" else "")
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            group["tokens"].append(before + ids)
            group["masks"].append([-100] * len(before) + ids)
            group["scores"].append(self._score(text, item["label"]))
        return group


if __name__ == "__main__":
    Totals.cli()
