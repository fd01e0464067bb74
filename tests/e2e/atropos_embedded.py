"""`instep atropos-train` with the embedded engine, and in float32, in the place of vLLM: fast on a CPU."""

import sys

from instep.cli import guarded
from instep_neighbours.atropos import trainer

_words_of = trainer.words_of


def words_of(flags):
    command, words = _words_of(flags)
    words[words.index("--rollout-backend") + 1] = "embedded"
    if "--vllm-max-model-len" in words:
        at = words.index("--vllm-max-model-len")
        del words[at : at + 2]
    return command, [*words, "--num-threads", "1"]


if __name__ == "__main__":
    trainer.words_of = words_of
    sys.exit(guarded(lambda: trainer.main(sys.argv[1:])))
