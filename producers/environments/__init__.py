"""The environment protocol, loading of environments, and processes for verifiers and for code of a policy."""
