"""The programs that users run."""
