"""The decoder, its tokenizers, files and sampler. Configuration, parameter names, tokenizers and files need no JAX."""
