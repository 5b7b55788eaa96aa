"""Every op that the proof harness checks, by name. A new op adds its registration here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.kernels_pallas.proof.op import OpProof
from jaxserve.kernels_pallas.ragged_paged_attention.proof.registration import PROOF as RAGGED_PAGED_ATTENTION

OPS: Mapping[str, OpProof[Any, Any]] = MappingProxyType({proof.name: proof for proof in (RAGGED_PAGED_ATTENTION,)})
