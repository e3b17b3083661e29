"""What users run. In an installed wheel this folder is the package train.scripts."""
