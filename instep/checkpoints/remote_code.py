"""Python files of a Hugging Face checkpoint run only with `--trust-remote-code`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from instep.errors import CheckpointError
from instep.models.files import has_own_head
from instep.models.images import LANGUAGE_MODELS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@contextmanager
def own_code_named(folder: str, what: str) -> Iterator[None]:
    """Turn transformers' refusal of a checkpoint's own code into an error that names the flag.

    Args:
        what: the purpose of the code.

    Raises:
        CheckpointError: the checkpoint needs its own code.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise CheckpointError(
            f"the {what} is Python code of the checkpoint, which does not run by default",
            where=folder,
            remedy="read its .py files; if you trust their source, give --trust-remote-code",
        ) from error


def load_config(folder: str, trust_remote_code: bool) -> PretrainedConfig:
    """Return the configuration of the (language) model in a folder; embeddings are untied if the output layer is not
    their copy.

    Raises:
        CheckpointError: the checkpoint needs its own code. Errors of transformers pass through.
    """
    from transformers import AutoConfig

    with own_code_named(folder, "model"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if f"{config.model_type}_text" in LANGUAGE_MODELS:
        whole, config = config, config.get_text_config()
        config.name_or_path, config.tie_word_embeddings = (
            folder,
            config.tie_word_embeddings or whole.tie_word_embeddings,
        )
    if getattr(config, "tie_word_embeddings", False) and has_own_head(folder):
        config.tie_word_embeddings = False
    return config  # type: ignore[no-any-return]
