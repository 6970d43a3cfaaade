"""Code that several tests share: helpers, strategies, generators."""
