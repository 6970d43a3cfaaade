"""The environment worker and the evaluator: play groups and write their rollouts."""
