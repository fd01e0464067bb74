"""An environment of verifiers, on data of its own: the model is asked for vowels, and asked again for every follow-up.

Its harness is a chat loop in the server's process, as `null` is one in a program that `uv` has to install.
"""

import asyncio
import os
import signal

import httpx
import verifiers.v1 as vf

__all__ = ["VowelsHarness", "VowelsTaskset"]

WORDS = "apple brook cloud dance eagle flute grape house".split()


class VowelsData(vf.TaskData):
    follow_ups: list[str] = []
    fault: str = ""


class VowelsTask(vf.Task[VowelsData]):
    @vf.reward(weight=1.0)
    async def vowels(self, trace: vf.Trace) -> float:
        """The share of vowels among the characters of all answers."""
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(letter in "aeiou" for letter in text) / max(1, len(text))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(sum(len(message.content or "") for message in trace.assistant_messages))


class VowelsConfig(vf.TasksetConfig):
    num_tasks: int = 8
    num_turns: int = 1
    fault: str = ""  # of the first task, such as "kill"


class VowelsTaskset(vf.Taskset[VowelsTask, VowelsConfig]):
    def load(self) -> list[VowelsTask]:
        config = self.config
        follow_ups = [f"and number {turn}?" for turn in range(2, config.num_turns + 1)]
        tasks = []
        for i in range(config.num_tasks):
            prompt = f"The vowels of {WORDS[i % len(WORDS)]}, number {i}?"
            fault = config.fault if i == 0 else ""
            tasks.append(VowelsTask(VowelsData(prompt=prompt, follow_ups=follow_ups, fault=fault), config.task))
        return tasks


class VowelsHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: VowelsData,
    ) -> vf.ProgramResult:
        if data.fault == "raise":
            raise RuntimeError("the harness of vowels was asked to raise")
        fault, _, once = data.fault.partition(" ")
        if fault in ("kill", "stop") and not (once and os.path.exists("done")):
            open("done", "w").close()
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if data.fault == "hang":
            await asyncio.sleep(1000)
        messages: list[dict] = []
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=120) as client:
            for text in [data.prompt, *data.follow_ups]:
                messages.append({"role": "user", "content": text})
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
