"""A run's topics as Parquet files, exactly once into the file set; and the way back into topics."""
