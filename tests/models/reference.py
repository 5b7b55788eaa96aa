"""Logits of transformers on the seeded weights. Needs torch."""

from __future__ import annotations

import copy

import numpy as np

from tests.models.cases import SEQUENCE_LENGTH, Case
from tests.models.seeded import checkpoint, token_ids


def reference_logits(case: Case) -> np.ndarray:
    """``[S, V]`` float32 logits of the whole prompt, from transformers' eager attention."""
    import torch
    import transformers

    spec = case.spec
    keys = copy.deepcopy(case.config)  # transformers changes what it is given.
    config = transformers.CONFIG_MAPPING[keys.pop("model_type")](**keys)
    config._attn_implementation = "eager"
    config.dtype = torch.float32
    model = getattr(transformers, keys["architectures"][0])(config).float().eval()
    state = {name: torch.from_numpy(values) for name, values in checkpoint(spec).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"} and spec.tied == bool(missing), missing
    model.tie_weights()
    with torch.no_grad():
        return model(torch.from_numpy(token_ids(spec, SEQUENCE_LENGTH)[None].astype(np.int64))).logits[0].float().numpy()
