"""The process of an embedded engine that computes, without memory for a prompt that begins with token 7.

`python -m tests.engines.faulty_runner MODEL DESCRIPTOR` answers at the end of a pipe.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from instep.engines.embedded.model import Runner, load_model
from instep.engines.embedded.scheduler import Scheduler
from instep.engines.embedded.weights import LiveWeights


class Faulty(Runner):
    def prefill(self, sequences: Any, source: Any, first_row: int) -> torch.Tensor:
        if any(sequence[0] == 7 for sequence in sequences):
            raise RuntimeError("not enough memory")
        return super().prefill(sequences, source, first_row)


if __name__ == "__main__":
    path, pipe = Path(sys.argv[1]), Connection(int(sys.argv[2]))
    model = load_model(str(path), torch.float32, torch.device("cpu"), 128, False)
    tokenizer = SimpleNamespace(get_vocab=dict, apply_chat_template=print)
    Scheduler(Faulty(model, 8, 128), LiveWeights(model, path), tokenizer, pipe).run()
