"""The inference server and its client: completions with token ids, logprobs and the version that sampled them."""
