"""Who writes rollouts: environments, workers, the inference server and the producer anyone may use."""
