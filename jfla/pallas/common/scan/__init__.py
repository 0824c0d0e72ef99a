"""The scans over chunks: states forward with the output or for the backward, and their cotangents in reverse."""
