"""An opened model: what it is, and how to load its parameters. The one way from a configuration to weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxserve.config import ModelConfig
from jaxserve.models.hf_config import spec_from_config
from jaxserve.models.loading.folder_files import read_config, read_generation_defaults
from jaxserve.models.loading.gguf_config import apply_rope_factors, gguf_architecture, gguf_config
from jaxserve.models.loading.gguf_file import GGUFFile, open_gguf
from jaxserve.models.loading.gguf_source import GGUFSource
from jaxserve.models.loading.orbax_layout import is_orbax_folder
from jaxserve.models.loading.progress import Progress
from jaxserve.models.loading.resolve import Resolved, resolve
from jaxserve.models.loading.safetensors_source import SafetensorsSource
from jaxserve.models.loading.source import TensorSource
from jaxserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from jaxserve.models.loading.assemble import Placement
    from jaxserve.models.model import Model
    from jaxserve.models.params import Params

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on this machine whose headers were read and checked, and whose weights were not.

    Args:
        name: The alias, or the last part of the path or hub id.
        path: A folder or a ``.gguf`` file.
        format: Of the weights.
        config: The Hugging Face config; for GGUF the one that its metadata amounts to.
        spec: What the decoder is.
        revision: The hub commit, for models from the hub.
        generation_defaults: The model's own sampling defaults; empty where it has none or the configuration says ``none``.
        gguf: The opened file, for GGUF.
    """

    name: str
    path: Path
    format: Literal["safetensors", "gguf", "orbax"]
    config: Mapping[str, Any]
    spec: ModelSpec
    revision: str | None = None
    generation_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gguf: GGUFFile | None = None

    def load_params(self, model: Model, *, device: Placement = None, progress: Progress | None = None) -> Params:
        """Loads the parameters, straight to where they belong.

        Args:
            model: Built from :attr:`spec`; says dtype and form.
            device: A device, a sharding, or ``None`` for the default device.
            progress: Called as values arrive.

        Raises:
            CheckpointError: Keys are missing, left over or misshapen, or data cannot be read.
        """
        # Importing these imports jax, and a jax array initialises its backend: only loading may.
        if self.format == "orbax":
            from jaxserve.models.loading.orbax_format import read_orbax

            return read_orbax(self.path, model, device=device, progress=progress)
        from jaxserve.models.loading.assemble import assemble

        return assemble(self.open_source(), model, device=device, progress=progress)

    def open_source(self) -> TensorSource:
        """The tensors of a safetensors or GGUF checkpoint."""
        if self.gguf is not None:
            return GGUFSource(self.gguf, gguf_architecture(self.gguf), num_heads=self.spec.num_heads, num_kv_heads=self.spec.num_kv_heads)
        return SafetensorsSource(self.path)


def open_checkpoint(config: ModelConfig, *, progress: Progress | None = None) -> Checkpoint:
    """Finds a model (fetching it where necessary) and reads what it is.

    Args:
        config: Its ``source``, ``revision`` and ``generation_config`` are used.
        progress: Told about downloads.

    Raises:
        ModelUnavailableError: It cannot be found or fetched.
        CheckpointError: It is broken.
        UnsupportedModelError: jaxserve does not implement it.
    """
    resolved = resolve(config.source, revision=config.revision, progress=progress)
    checkpoint = _open_gguf(resolved) if resolved.path.is_file() else _open_folder(resolved)
    if config.generation_config == "none":
        checkpoint = dataclasses.replace(checkpoint, generation_defaults={})
    if checkpoint.generation_defaults:
        logger.info("sampling defaults of %s: %s", checkpoint.name, dict(checkpoint.generation_defaults))
    return checkpoint


def _open_gguf(resolved: Resolved) -> Checkpoint:
    file = open_gguf(resolved.path)
    config = gguf_config(file)
    spec = apply_rope_factors(file, spec_from_config(config))
    return Checkpoint(name=resolved.name, path=resolved.path, format="gguf", config=config, spec=spec, gguf=file)


def _open_folder(resolved: Resolved) -> Checkpoint:
    config = read_config(resolved.path)
    return Checkpoint(
        name=resolved.name,
        path=resolved.path,
        format="orbax" if is_orbax_folder(resolved.path) else "safetensors",
        config=config,
        spec=spec_from_config(config),
        revision=resolved.revision,
        generation_defaults=read_generation_defaults(resolved.path),
    )
