"""The HTTP dialects of the inference server: each validates requests and builds answers, whole or streamed. Pure."""
