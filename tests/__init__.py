"""Tests; they mirror the package's folders."""
