"""Finished runs -> numbers and tables; without torch."""
