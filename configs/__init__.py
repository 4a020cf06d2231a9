"""Data only: published model configs and settings of commands. A package, so that installed code finds its files."""
