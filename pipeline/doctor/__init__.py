"""Says what a role sees of the brokers: each fault with its remedy."""
