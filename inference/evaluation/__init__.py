"""Measurements of drafters, checks that they are lossless, and reports."""
