"""Stateless tensor functions: the table, its slow and obviously right reference, and faster fillings of it."""
