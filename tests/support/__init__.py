"""What tests share: calls, goldens, oracles."""
