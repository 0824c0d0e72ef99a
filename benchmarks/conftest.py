"""Keeps pytest from importing the peers, whose packages are optional."""

collect_ignore_glob = ["peer_*.py"]
