"""The decoder, its tokenizers, files and sampler. Only attention, decoder, sampler and vocabulary import JAX."""
