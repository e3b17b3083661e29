"""Does foredraft do with published configs what it promises? Each config.json, shrunken, with random weights: published.py is
the command, test_published.py the same under pytest. Modules without `test_` in their names hold the checks."""
