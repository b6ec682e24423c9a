"""The decision problem: a batched replay engine over recorded traces, and its gymnasium face."""
