"""Unit tests compile many small JAX functions and run each a few times: XLA's optimiser costs more than it gives."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
