"""The decoder, its tokenizer and its sampler. Only decoder.py and sampler.py import JAX."""
