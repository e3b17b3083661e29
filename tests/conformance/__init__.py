"""Does foredraft do with published configs what it promises? Each config.json, shrunken, with random weights:
test_published.py; the other modules hold the checks."""
