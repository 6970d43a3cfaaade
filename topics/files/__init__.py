"""Files of a machine and objects of a store, written whole or not at all."""
