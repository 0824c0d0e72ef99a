"""What happens to a call before any implementation: validation, elementwise transforms, chunks."""
