"""Files of runs for tests of what deploys them."""

MUCH = """
run = "arithmetic"

[[environments]]
use = "tasks.py:Sums"
rewards = "labeler"

[labeling]
labeler = "judge"
judge.url = "http://judge:8000/v1"

[gateway]
port = 8100
api_key = "file:keys/gateway"

[inference]
replicas = 2

[learner]
processes = 2

[evaluation]
every_versions = 50

[worker]
api_key = "env:MODEL_KEY"
"""
"""A run with every role of language models but engines of others, and with secrets of both kinds."""
