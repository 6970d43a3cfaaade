"""Fixtures of tests on a real broker."""

from tests.support.run_fixtures import _compile_once, compiled, kafka, real_run, run  # noqa: F401
