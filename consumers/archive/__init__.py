"""Archives of runs: topics as Parquet files, each record exactly once, and restoring them into topics."""
