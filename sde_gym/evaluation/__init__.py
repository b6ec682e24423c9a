"""Evaluation: benchmarks of the real decoder, the demo, and the report made from them."""
