"""What TRL's own `VLLMClient` gets from a server, as JSON; run in the environment of a TRL (`.venv-trl-1.10`).

    python trl_client.py URL GROUP_PORT MODEL OTHER OUT

MODEL is what the server has loaded, OTHER a checkpoint whose weights are sent to it. `stub_vllm` must be first on the
PYTHONPATH. Nothing of instep is imported here.
"""

import json
import sys
from importlib.metadata import version

PROMPTS = [[5, 6, 7, 8], [9, 10], [5, 6, 7, 8, 9, 10, 11]]
CHAT = [[{"role": "user", "content": "12+30=?"}], [{"role": "user", "content": "7"}]]
SAMPLING = {"n": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 6, "generation_kwargs": {"seed": 3}}


def scores(client, sequences):
    """Log-probs of whole sequences with the four likeliest tokens at each place."""
    return client.get_sequence_logprobs(sequences, [1] * len(sequences), top_logprobs=4)


def main() -> None:
    import cpu_as_cuda  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM
    from trl.generation.vllm_client import VLLMClient

    url, port, model, other, out = sys.argv[1:]
    client = VLLMClient(base_url=url, group_port=int(port), connection_timeout=60.0)
    found = {
        "vllm": version("vllm"),
        "tokens": client.generate(PROMPTS, **SAMPLING),
        "plain": client.generate(PROMPTS, max_tokens=3, logprobs=None, generation_kwargs={"seed": 1}),
        "top": client.generate(PROMPTS, max_tokens=3, logprobs=2, generation_kwargs={"seed": 1}),
        "texts": client.generate(["12+", "7"], max_tokens=3, temperature=0.0),
        "chat": client.chat(CHAT, **SAMPLING),
        "before": scores(client, PROMPTS),
    }
    client.init_communicator(device="cpu")
    for i, path in enumerate((other, model)):
        client.update_model_params(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        client.reset_prefix_cache()
        found[f"after {i}"] = scores(client, PROMPTS)
    found["tokens again"] = client.generate(PROMPTS, **SAMPLING)
    try:
        client.generate(PROMPTS, generation_kwargs={"no_such_thing": 1})
    except Exception as error:  # noqa: BLE001 - whichever it is, the test looks at it
        found["refusal"] = str(error)
    client.close_communicator()
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
