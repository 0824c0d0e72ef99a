"""implementation="xla": the chunked ops in plain JAX, on any device, in any float dtype."""
