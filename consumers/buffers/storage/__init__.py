"""Storage shared by buffers: atomic files, locks, checksums, seeded draws."""
