"""Three broken write phases of the TPU kernel, for the checking interpreter to catch. A process: ``python -m tests.kernels.seeded_bugs NAME``."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels_pallas.proof.checked import check
from jaxserve.kernels_pallas.ragged_paged_attention.proof.comparison import compare_checked
from jaxserve.kernels_pallas.ragged_paged_attention.shapes import CASES
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_write import write_windows


class _Forgetful:
    """A copy whose ``wait`` does nothing."""

    def __init__(self, copy: Any) -> None:
        self.start = copy.start

    def wait(self) -> None:
        pass


def missing_wait(windows: Any, first_page: Any, new_ref: Any, pool_ref: Any, scratch: Any) -> None:
    """The tile of the pool is merged and written back without waiting until it has been read."""
    make_copy, pool_buffer = pltpu.make_async_copy, scratch[1]

    def make(source: Any, destination: Any, semaphore: Any) -> Any:
        copy = make_copy(source, destination, semaphore)
        return _Forgetful(copy) if destination.ref is pool_buffer else copy

    with mock.patch.object(pltpu, "make_async_copy", make):
        write_windows(windows, first_page, new_ref, pool_ref, scratch)


def page_out_of_range(windows: Any, first_page: Any, new_ref: Any, pool_ref: Any, scratch: Any) -> None:
    """The layer's first page is a whole pool too far."""
    write_windows(windows, first_page + pool_ref.shape[0], new_ref, pool_ref, scratch)


class _OneMore:
    """Scalars in SMEM, each plus one."""

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __getitem__(self, index: Any) -> Any:
        return self.ref[index] + 1


def wrong_row(windows: Any, first_page: Any, new_ref: Any, pool_ref: Any, scratch: Any) -> None:
    """New rows go one row too far within their tile."""
    write_windows(windows._replace(rows_W=_OneMore(windows.rows_W)), first_page, new_ref, pool_ref, scratch)


BUGS = {bug.__name__: bug for bug in (missing_wait, page_out_of_range, wrong_row)}

if __name__ == "__main__":
    case = next(case for case in CASES if case.name == "decode_only")
    print(json.dumps(check(case.name, lambda interpret: compare_checked(case, interpret, write_phase=BUGS[sys.argv[1]]))))
