"""The inference server and its client: completions with token ids, logprobs and the policy version that sampled them."""
