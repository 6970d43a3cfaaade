"""Bytes of records and of what they hold: the catalogue of topics, the codec, validation, digests and signatures."""
