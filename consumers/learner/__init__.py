"""The JAX learner: packing, loss, optimizer step, checkpoints."""
