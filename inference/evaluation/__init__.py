"""What a drafter gains and whether it is lossless: measurements, audits, reports."""
