"""Storage shared by buffers: journals, checked Parquet files, locks, seeded draws."""
