"""The store of rollout groups and training batches as Parquet files."""
