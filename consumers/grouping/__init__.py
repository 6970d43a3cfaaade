"""Groups rollouts into training batches, exactly once: a pure fold over a partition and a thin transactional shell."""
