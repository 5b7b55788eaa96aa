"""An opened model: what it is, and how to load its parameters. The one way from a configuration to weights."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.hf_config import spec_from_config
from jaxserve.models.loading.folder_files import read_config, read_generation_defaults
from jaxserve.models.loading.gguf_config import gguf_architecture, gguf_config, rope_factors
from jaxserve.models.loading.gguf_file import GGUFFile, open_gguf
from jaxserve.models.loading.gguf_source import GGUFSource
from jaxserve.models.loading.orbax_layout import is_orbax_folder, read_rope_factors
from jaxserve.models.loading.progress import Progress
from jaxserve.models.loading.resolve import Resolved, resolve
from jaxserve.models.loading.safetensors_source import SafetensorsSource
from jaxserve.models.loading.source import TensorSource
from jaxserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from jaxserve.mesh import Layout
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

    def load_params(self, model: Model, *, layout: Layout | None = None, progress: Progress | None = None) -> Params:
        """Loads the parameters, straight to where they belong. Each process reads what its own devices need.

        Args:
            model: Built from :attr:`spec`, with KV heads repeated or not; says dtype and form.
            layout: How the parameters are split over devices; ``None`` puts them on jax's default device.
            progress: Called as values arrive.

        Raises:
            CheckpointError: Keys are missing, left over or misshapen, or data cannot be read.
        """
        # Importing this imports jax, and a jax array initialises its backend: only loading may.
        from jaxserve.models.loading.assemble import assemble

        return assemble(self.open_source(), model, layout=layout, progress=progress)

    def open_source(self) -> TensorSource:
        """The checkpoint's tensors. Imports jax for Orbax only."""
        if self.gguf is not None:
            heads = self.spec.attention
            return GGUFSource(self.gguf, gguf_architecture(self.gguf), num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads)
        if self.format == "orbax":
            from jaxserve.models.loading.orbax_source import OrbaxSource

            return OrbaxSource(self.path, self.spec)
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
    spec = _with_rope_factors(spec_from_config(config), rope_factors(file), file.path)
    return Checkpoint(name=resolved.name, path=resolved.path, format="gguf", config=config, spec=spec, gguf=file)


def _open_folder(resolved: Resolved) -> Checkpoint:
    folder = resolved.path
    config = read_config(folder)
    is_orbax = is_orbax_folder(folder)
    return Checkpoint(
        name=resolved.name,
        path=folder,
        format="orbax" if is_orbax else "safetensors",
        config=config,
        spec=_with_rope_factors(spec_from_config(config), read_rope_factors(folder) if is_orbax else None, folder),
        revision=resolved.revision,
        generation_defaults=read_generation_defaults(folder),
    )


def _with_rope_factors(spec: ModelSpec, factors: Sequence[float] | None, path: Path) -> ModelSpec:
    """Divides the inverse frequencies by factors that a config cannot express."""
    if factors is None:
        return spec
    num_factors = len(spec.ropes[0].inv_freq)
    if len(factors) != num_factors or not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise CheckpointError(f"{path}: its rope factors are not {num_factors} positive numbers: {factors!r:.80}")
    # Rounded as the frequencies of a config are: to float32.
    ropes = tuple(
        dataclasses.replace(rope, inv_freq=tuple((np.asarray(rope.inv_freq) / np.asarray(factors)).astype(np.float32).tolist())) for rope in spec.ropes
    )
    return dataclasses.replace(spec, ropes=ropes)
