"""The backend-neutral training worker: what one rank does for each call of the controller.

The controller calls the same method on all ranks at once; tensors arrive and leave on the CPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist

from instep.arguments.args import Args
from instep.arguments.settings import Settings
from instep.checkpoints.adapter import lora_of
from instep.checkpoints.dist_checkpoint import seed_all
from instep.checkpoints.remote_code import load_config
from instep.system.importing import first_import
from instep.training.backend import Frozen, LossFn, LossOutput, ParallelInfo, Role, TokenOutputs, TrainBackend
from instep.training.begun_step import BegunStep
from instep.training.gap import COLUMN, FreshGap, measured
from instep.training.losses import loss_fn_from_args, metrics_of_step, value_loss_fn
from instep.training.megatron.hooks import MegatronHooks
from instep.training.megatron.upstream_fixes import require_megatron
from instep.training.own_choices import OwnChoices
from instep.training.postprocess import postprocessed
from instep.training.profile import Profiled
from instep.training.rendezvous import store
from instep.training.rounding import UNITS, rounded_embedding
from instep.training.selection import selection_of
from instep.training.worker_weights import WorkerWeights, load_weights
from instep.types import TokenBatch
from instep.weights.parking import give_back
from instep_engine.gloo import guard_groups

if TYPE_CHECKING:
    from instep.training.megatron.backend import MegatronBackend


class Worker(Profiled, WorkerWeights):
    """One rank of the actor, or of PPO's critic.

    Args:
        emit: sends a report to the controller during a call.
    """

    backend: TrainBackend
    reference: Frozen | None = None
    teacher: Frozen | None = None

    def __init__(self, emit: Callable[[Any], None]):
        self._emit = emit
        self._settled = False
        self._begun: BegunStep | None = None
        self._left_out: list[str] = []  # of the weights of reference and teacher

    # ---- start ---------------------------------------------------------------------------------------------------

    def prepare(self, args: Settings) -> None:
        """Import what the model needs. With GPUs shared in turns, engines start meanwhile: it must not touch a GPU."""
        name = "instep.training.hf.backend"
        if args.train_backend == "megatron":
            require_megatron()
            if args.device == "cpu":  # on a CPU its replacements for CUDA come first
                return
            name = "megatron.core.optimizer"
        with first_import(name):
            importlib.import_module(name)

    def setup(
        self,
        args: Args,
        rank: int,
        world_size: int,
        rendezvous: str,
        num_threads: int,
        role: Role = "actor",
        gpu: int | None = None,
    ) -> ParallelInfo:
        """Join the process group and build the model, without weights.

        Args:
            args: the arguments of this role (`arguments.roles`).
            rendezvous: a file visible to all ranks, or `tcp://HOST:PORT`; rank 0 gets `tcp://HOST:PORT?fd=N` with a
                listening socket.
            gpu: index of the GPU, modulo the number of visible GPUs; default: `rank`.

        Returns:
            The place of this rank, without its process group.
        """
        self.args, self.role = args, role
        self._hooks = MegatronHooks.from_args(args)  # all None with --train-backend hf
        self._choices = OwnChoices(args, role)
        self._host = urlsplit(rendezvous).hostname or ""  # of rank 0, if ranks may be on several hosts
        torch.set_num_threads(num_threads)
        cuda = args.device == "cuda"
        if cuda:
            torch.cuda.set_device((rank if gpu is None else gpu) % torch.cuda.device_count())
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.prepare(args)  # if this did not run while engines started
        guard_groups()
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store(rendezvous, world_size, args.train_timeout),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=args.train_timeout),
        )
        seed_all(args.seed, args.seed + rank)
        torch.use_deterministic_algorithms(args.deterministic_mode)
        if args.no_torch_compile:
            with first_import("torch._dynamo"):
                torch.compiler.set_stance("force_eager")
        self.backend = self._build(with_optimizer=True)
        self.loss_fn = value_loss_fn(args.value_clip) if role == "critic" else loss_fn_from_args(args)
        return replace(self.backend.parallel, dp_group=None)

    def _build(self, *, with_optimizer: bool, like: Path | None = None) -> TrainBackend:
        """Build a model, without weights, in the shape of the Hugging Face folder `like` (default: --hf-checkpoint)."""
        config = load_config(str(like or self.args.hf_checkpoint), self.args.trust_remote_code)
        vars(config).pop("quantization_config", None)  # `load_hf` reads FP8 weights as `dtype`
        options: dict[str, Any] = {
            "hf_config": config,
            "device": self.device,
            "dtype": torch.bfloat16 if self.args.precision == "bf16" else torch.float32,
            "with_optimizer": with_optimizer,
            "role": self.role,
            "selection": selection_of(self.args) if with_optimizer and self.role == "actor" else None,
            "lora": lora_of(self.args) if with_optimizer and self.role == "actor" else None,  # a critic trains all
        }
        if self.args.train_backend == "megatron":
            if self.device.type == "cpu":
                from instep.training.megatron import cpu_platform

                cpu_platform.install()
            from instep.training.megatron.backend import MegatronBackend

            return MegatronBackend(self.args, **options, hooks=self._hooks)
        from instep.training.hf.backend import HfBackend

        return HfBackend(self.args, **options)

    def load_reference(self, path: Path) -> None:
        """Build the frozen reference from a Hugging Face checkpoint, an instep checkpoint, or the actor's base."""
        self.reference = self.backend.earlier(path) or self._frozen(path)

    def load_teacher(self, path: Path) -> None:
        """Build the teacher of on-policy distillation in the same way; its shape may differ, its vocabulary may not."""
        self.teacher = self._frozen(path)

    def _frozen(self, path: Path) -> TrainBackend:
        model = self._build(with_optimizer=False, like=path if (path / "config.json").exists() else None)
        load_weights(model, path)
        self._left_out.append(model.left_out)
        if self.args.offload_train:
            model.offload()
        return model

    @contextlib.contextmanager
    def _there(self, model: Frozen) -> Iterator[None]:
        """Keep a frozen model on the device while it is used (--offload-train)."""
        if self.args.offload_train:
            model.onload()
        yield
        if self.args.offload_train:
            model.offload()

    def offload(self, weights: bool) -> None:
        """Free the device's memory, see `TrainBackend.offload`; without --offload-train, only unused memory."""
        self.backend.offload(weights=weights) if self.args.offload_train else give_back(self.device)

    def onload(self, optimizer: bool) -> None:
        """Undo `offload`; see `TrainBackend.onload`."""
        self.backend.onload(optimizer=optimizer)

    def refresh_reference(self, scratch: Path) -> None:
        """Make the reference a copy of the current actor (--ref-update-interval)."""
        assert self.reference is not None
        self.export_hf(scratch, adapter=self.reference.is_adapter)
        dist.barrier()
        with self._there(self.reference):
            self.reference.load_hf(scratch)

    def remark(self) -> str:
        """See `TrainBackend.remark`; adds the weights of reference and teacher that were not read."""
        return "\n".join(filter(None, (self.backend.remark(), *self._left_out)))

    # ---- log-probs and training ----------------------------------------------------------------------------------

    def log_probs(self, batch: TokenBatch, micro_batches: list[list[int]], names: list[str]) -> dict[str, Any] | None:
        """Score a data-parallel rank's samples under the old policy (`log_probs`), the reference and the teacher.

        Args:
            names: any of `log_probs` (of the current weights), `ref_log_probs`, `teacher_log_probs`; for a critic
                `values`.

        Returns:
            Name -> float32 `[num_response_tokens]` in the order of `micro_batches`, on the output rank of this
            data-parallel rank; None on its other ranks.
        """
        parts = [batch.select(indices).to(self.device) for indices in micro_batches]
        columns: dict[str, torch.Tensor] = {}
        for name in (n for n in names if n in ("log_probs", "values")):
            self._before_log_probs(self.backend, "")
            outputs = self.backend.forward_only(self._choices.noting(parts))
            if outputs is not None:
                columns[name] = torch.cat([getattr(o, name) for o in outputs]).cpu()
        for name, model in (("ref_log_probs", self.reference), ("teacher_log_probs", self.teacher)):
            if name in names:
                assert model is not None, "the controller has loaded it"
                with self._there(model):
                    self._before_log_probs(model, name.removesuffix("log_probs"))
                    outputs = model.forward_only([part.without_routes() for part in parts])
                if outputs is not None:
                    columns[name] = torch.cat([o.log_probs for o in outputs]).cpu()
        return columns if self.backend.parallel.is_output_rank else None

    def _before_log_probs(self, model: Frozen, prefix: str) -> None:
        if self._hooks.log_probs is not None:
            owner = self.backend if model.is_adapter else model  # the actor with another adapter
            self._hooks.before_log_probs(cast("MegatronBackend", owner).wrapped, prefix)

    def begin_step(
        self, batch: TokenBatch, micro_batches: list[list[int]], token: str
    ) -> dict[int, torch.Tensor] | None:
        """Compute the gradients of some samples of a rollout's only optimizer step; more may follow, with the same
        token.

        Their `loss_weights` do not have the factor common to all samples of the step. `train` gets this factor, and
        finishes the step. A step with another token is dropped.

        Returns:
            By index the log-probs and entropies `[2, response_length]` of all samples, None except on the output rank.
        """
        if self._begun is None or self._begun.token != token:
            self._forget_begun()
            self._begun = BegunStep(token, self._gap(batch))
        kept: dict[int, torch.Tensor] = {}
        keeping = self._loss_that_keeps(micro_batches, range(batch.num_samples), kept)
        loss_fn = measured(self._begun.gap, batch, keeping)
        parts = [batch.select(indices).to(self.device) for indices in micro_batches]
        self._begun.outputs += self.backend.forward_backward(parts, loss_fn, more=True) or []
        return {i: row.cpu() for i, row in kept.items()} if self.backend.parallel.is_output_rank else None

    def _forget_begun(self) -> None:
        if self._begun is not None:
            self.backend.scale_gradients(0.0)
        self._begun = None

    def _take_begun(self, scale: float | None) -> BegunStep | None:
        """Return the step of `begin_step`, times `scale`; without `scale`, drop it."""
        if scale is None:
            self._forget_begun()
            return None
        begun, self._begun = self._begun, None
        assert begun is not None, "the controller knows which step was started"
        begun.scale(self.backend, scale)
        return begun

    def _gap(self, batch: TokenBatch) -> FreshGap | None:
        return FreshGap(self.device) if COLUMN in batch.token_columns and self.role == "actor" else None

    def train(
        self,
        batch: TokenBatch,
        steps: list[list[list[int]]],
        lrs: list[float],
        keep: Collection[int] = (),
        gap_limit: float = math.inf,
        rollout_id: int = 0,
        scale: float | None = None,
    ) -> tuple[list[dict[str, float]], dict[int, torch.Tensor], float | None] | None:
        """Run the optimizer steps of one rollout on this data-parallel rank's samples.

        Args:
            steps: step -> micro-batch -> indices into `batch`; lrs: the learning rate of each step.
            keep: indices into `batch` of the samples whose log-probs and entropies are returned.
            gap_limit: the largest mean gap of fresh tokens (`gap.py`) that allows training; measured over the rollout
                if it was scored first, otherwise over the first step.
            scale: `batch` is the rest of a step that `begin_step` has started; the started part's loss is multiplied by
                it. None: drop the started part.

        Returns:
            The metrics of each step; by index the log-probs and entropies `[2, response_length]` of the `keep` samples,
            from the forward pass of their step; and the mean gap of fresh tokens, None without fresh tokens. Above
            `gap_limit` nothing was trained. None except on this data-parallel rank's output rank.
        """
        results: list[dict[str, float]] = []
        kept: dict[int, torch.Tensor] = {}
        begun = self._take_begun(scale)
        gap = self._gap(batch) if begun is None else begun.gap
        mean: float | None = None
        adding_gap = partial(measured, gap, batch)
        batch = postprocessed(self.args, rollout_id, batch) if self.role == "actor" else batch
        logits = self.args.loss_type == "custom_loss" and self.role == "actor"
        for n, (micro_batches, lr) in enumerate(zip(steps, lrs, strict=True)):
            parts = [batch.select(indices).to(self.device) for indices in micro_batches]
            loss_fn = self._loss_that_keeps(micro_batches, keep, kept) if keep else self.loss_fn
            loss_fn = adding_gap(loss_fn) if n == 0 else loss_fn
            if self._hooks.step is not None:
                megatron = cast("MegatronBackend", self.backend)
                megatron.ready()
                self._hooks.before_step(rollout_id, n, megatron.wrapped, megatron.optimizer)
            outputs = self.backend.forward_backward(self._choices.replayed(parts), loss_fn, logits=logits)
            if gap is not None and n == 0 and (mean := gap.mean()) > gap_limit:
                break
            step = self.backend.optimizer_step(lr)
            if outputs is not None:
                outputs = [*(begun.outputs if begun is not None and n == 0 else ()), *outputs]
                metrics = metrics_of_step(outputs, self.backend.parallel)
                results.append({**metrics, "grad_norm": step.grad_norm, "lr": lr, "skipped_steps": float(step.skipped)})
        self._settle()
        if not self.backend.parallel.is_output_rank:
            return None
        return results, {i: row.cpu() for i, row in kept.items()}, mean

    def _settle(self) -> None:
        """Freeze the garbage collector's objects after the first training, which imports and compiles the last modules.

        Garbage collections, two in each turn on the GPU (`give_back`), then skip these objects.
        """
        if not self._settled:
            gc.collect()
            gc.freeze()
            self._settled = True

    def _loss_that_keeps(
        self, micro_batches: list[list[int]], wanted: Collection[int], kept: dict[int, torch.Tensor]
    ) -> LossFn:
        """Return a loss that also copies log-probs and entropies of the `wanted` samples into `kept`."""
        calls = iter(micro_batches)  # one per call, in this order: see `TrainBackend`

        def loss_fn(batch: TokenBatch, outputs: TokenOutputs) -> LossOutput:
            assert outputs.entropy is not None, "forward_backward computes it"
            lengths, columns = batch.on_host.response_lengths.tolist(), (outputs.log_probs, outputs.entropy)
            parts = zip(next(calls), *(column.detach().split(lengths) for column in columns), strict=True)
            kept.update({i: torch.stack(rows) for i, *rows in parts if i in wanted})
            return self.loss_fn(batch, outputs)

        return loss_fn

    def score(self, batch: TokenBatch) -> torch.Tensor | None:
        """Score a sync's probe, first normally, then with embeddings that are rounded once more; all ranks score all of
        it.

        Returns:
            Log-probs, float32 `[2, num_response_tokens]`; None except on an output rank.
        """
        found = [self.backend.forward_only([batch.to(self.device)])]
        with rounded_embedding(self.backend.embedding, UNITS[self.args.precision]):
            found.append(self.backend.forward_only([batch.to(self.device)]))
        if not self.backend.parallel.is_output_rank:
            return None
        return torch.stack([outputs[0].log_probs.cpu() for outputs in found if outputs is not None])

    def memory(self) -> dict[str, float]:
        """Return the memory of this rank and of its GPU in bytes, by name; the peak is since the last call.

        The used GPU memory outside of this rank belongs to the engines, and to the CUDA contexts of all processes.
        """
        out = {"trainer_host_bytes": float(psutil.Process().memory_info().rss)}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            out |= {
                "trainer_bytes": float(torch.cuda.memory_allocated(self.device)),
                "trainer_reserved_bytes": float(reserved),
                "trainer_peak_bytes": float(torch.cuda.max_memory_allocated(self.device)),
                "others_bytes": float(total - free - reserved),
                "free_bytes": float(free),
            }
            torch.cuda.reset_peak_memory_stats(self.device)
        return out
