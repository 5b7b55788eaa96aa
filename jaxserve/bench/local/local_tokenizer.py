"""A tokenizer of this machine, to count the tokens of texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxserve.errors import BenchmarkError


def load_count(source: str) -> Callable[[str], int]:
    """Tokens of a text without special tokens.

    Args:
        source: A ``tokenizer.json``, a folder that holds one, or a model as ``jaxserve run`` takes it (that way imports jax).

    Raises:
        BenchmarkError: A file that is no tokenizer.
        ModelError: No such model.
    """
    path = Path(source).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.suffix == ".json" and file.is_file():
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises nothing more precise
            raise BenchmarkError(f"{file} is no tokenizer: {error}") from None
        return lambda text: len(backend.encode(text, add_special_tokens=False).ids)

    from jaxserve.config import ModelConfig
    from jaxserve.models.loading.checkpoint import open_checkpoint
    from jaxserve.platform import choose_platform
    from jaxserve.tokenizer import load_tokenizer

    choose_platform("cpu")
    tokenizer = load_tokenizer(open_checkpoint(ModelConfig(source=source)))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
