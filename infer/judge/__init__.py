"""The judge: how fast speculation is, and with numbers one can trust, how lossless."""
