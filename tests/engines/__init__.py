"""Tests against real inference engines of others, each installed in an environment of its own."""
