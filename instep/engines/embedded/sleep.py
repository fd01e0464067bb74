"""An engine that frees its memory for the trainer, by the routes of vLLM: /sleep, /wake_up and /is_sleeping."""

from instep.engines.embedded.model import Runner
from instep.engines.embedded.protocol import HttpError
from instep.weights.parking import Parking, give_back

TAGS = ("weights", "kv_cache")
ASLEEP = "the engine sleeps while the trainer works on its memory"


class Sleep:
    """The sleep of a runner's model and cache. At level 1 the weights wait on the host, at level 2 they are lost."""

    def __init__(self, runner: Runner):
        self._runner, model = runner, runner.model
        self._levels = {
            1: Parking(runner.device, lambda: [*model.parameters(), *model.buffers()]),
            2: Parking(runner.device, model.buffers, model.parameters),
        }
        self.asleep: frozenset[str] = frozenset()

    def sleep(self, level: int) -> None:
        """Free everything; no request may be running."""
        if self.asleep:
            return
        for tensor in (*self._runner.model.parameters(), *self._runner.model.buffers()):
            if not tensor.untyped_storage().resizable():  # it lies in the file that it was read from
                tensor.data = tensor.data.clone()
        self._levels[level].free()
        self._runner.empty()
        give_back(self._runner.device)
        self.asleep = frozenset(TAGS)

    def wake(self, tags: list[str]) -> None:
        """Take the memory of `tags` again."""
        if unknown := set(tags) - set(TAGS):
            raise HttpError("BadRequestError", f"tags={sorted(unknown)}: {' and '.join(TAGS)}")
        if "weights" in self.asleep & set(tags):
            for parking in self._levels.values():
                parking.bring()
                parking.ready()
        self.asleep -= set(tags)

    def check_weights(self) -> None:
        if "weights" in self.asleep:
            raise HttpError("SessionError", f"{ASLEEP}: POST /wake_up?tags=weights first")
