"""Episodes from recorded model calls: token sequences of calls, and the branches they fold into. Pure."""
