"""Baseline of `codec`: the three arrays alone, by numpy's tobytes and frombuffer, in an Avro record of bytes fields.

Any Avro format with raw arrays has at least this cost: there is no framing, no other field and no dataclass.
"""

import io

import fastavro
import numpy as np

from rollstream.topics.records import Rollout
from tests.bench.measure import Stopwatch, Timing

_DTYPES = (("tokens", "<i4"), ("loss_mask", "|b1"), ("logprobs", "<f4"))
_SCHEMA = fastavro.parse_schema(
    {"type": "record", "name": "Arrays", "fields": [{"name": name, "type": "bytes"} for name, _dtype in _DTYPES]}
)


def measure(rollout: Rollout, times: int) -> Timing:
    """Encode and decode the arrays `times` times."""
    watch = Stopwatch()
    for _ in range(times):
        out = io.BytesIO()
        fastavro.schemaless_writer(
            out,
            _SCHEMA,
            {
                "tokens": rollout.tokens.tobytes(),
                "loss_mask": rollout.loss_mask.tobytes(),
                "logprobs": rollout.logprobs.tobytes(),
            },
        )
        values = fastavro.schemaless_reader(io.BytesIO(out.getvalue()), _SCHEMA, None)
        for name, dtype in _DTYPES:
            np.frombuffer(values[name], dtype)
    return watch.timing(times)
