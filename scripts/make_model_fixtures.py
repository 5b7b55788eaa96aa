"""Writes tests/models/fixtures: logits of transformers on the seeded tiny models, for interpreters without torch.

Run from the repository's root in an environment with a CPU build of torch: ``python -m scripts.make_model_fixtures``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.models.cases import CASES, SEQUENCE_LENGTH
from tests.models.reference import reference_logits
from tests.models.seeded import SEED, checkpoint_digest, token_ids

FIXTURES = Path("tests/models/fixtures")
ROWS = (0, 7, 23, SEQUENCE_LENGTH - 1)
"""Before and past the windows and the original rope lengths of the cases."""


def main() -> None:
    """Writes one file a case."""
    FIXTURES.mkdir(exist_ok=True)
    for case in CASES:
        logits_SV = reference_logits(case)
        ids = token_ids(case.spec, SEQUENCE_LENGTH)
        np.savez_compressed(
            FIXTURES / f"{case.name}.npz",
            config=json.dumps(case.config),
            seed=SEED,
            weights=checkpoint_digest(case.spec),
            token_ids=ids,
            rows=np.asarray(ROWS),
            logits=logits_SV[list(ROWS)],
        )


if __name__ == "__main__":
    main()
