"""Input of training steps: selection of batches and rollouts, packing, prefetching."""
