"""Mixed attacks on a local fleet, beside clients that must not notice: `make attack`, see README.md."""
