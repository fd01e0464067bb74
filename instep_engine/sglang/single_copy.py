"""`--weight-sync single-copy`: the trainer writes into the weights that this SGLang computes with (`memory.py`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from instep_engine import MEMORY_VARIABLE
from instep_engine.in_place import InPlace
from instep_engine.memory import CannotShare, Recorder, Sample, check_record, cuda_memories, move, write_manifest
from instep_engine.place import check_memory_folder
from instep_engine.sglang.weights import Weights


class Shared(InPlace, Weights):
    """The weights of a model in the memory of the run that has started this engine."""

    def __init__(self, updater: Any, drafters: Sequence[torch.nn.Module] = ()):
        from sglang.srt.distributed.parallel_state import get_tp_group
        from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

        super().__init__(updater)
        reason = self._reason or (self._derive and f"{type(updater.get_model()).__name__} derives some of its weights")
        if reason:
            raise CannotShare(f"--weight-sync single-copy: {reason}; use --weight-sync shm")
        folder = Path(os.environ[MEMORY_VARIABLE])
        check_memory_folder(str(folder))
        self.model, config, ranks = updater.get_model(), updater.model_config, get_tp_group()
        with torch.no_grad():
            memories = [move(self.model.parameters(), folder, updater.tp_rank)] if self._at.type == "cpu" else []
            recorder = self._record(updater)
            check_record(recorder, self.model, VocabParallelEmbedding)
            memories = memories or cuda_memories(self.model.parameters(), self._at)
        self.slices = recorder.slices
        self.sample = Sample(self.slices)
        about = {
            "architecture": config.hf_config.architectures[0],
            "dtype": str(config.dtype).removeprefix("torch."),
            "num_ranks": ranks.world_size,
        }
        shapes = {name: tuple(recorder.sources[name].shape) for name in self.slices}
        self.nonce = write_manifest(folder, updater.tp_rank, about, memories, self.slices, shapes, ranks.barrier)

    def _record(self, updater: Any) -> Recorder:
        """Load the checkpoint once more, and record where its weights come to."""
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import get_model_loader

        recorder = Recorder([*self.model.parameters(), *self.model.buffers()])
        loader = get_model_loader(LoadConfig(), updater.model_config)
        with recorder:
            self.model.load_weights(recorder.seen(loader._get_all_weights(updater.model_config, self.model)))
        return recorder
